"""Checkpoints under the key names and options of the released PowerNorm code's fairseq 0.8."""

import math
from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
from fairseq.logging import meters

WIDTH, HIDDEN, HEADS, LAYERS = 16, 24, 4, 2
PUBLISHED = ("power", "power", "layer", "layer")


def options(norms=PUBLISHED, **more):
    """A namespace as fairseq 0.8 stores it; ``norms`` in the order of the fork's scripts."""
    stack = {"embed_path": None, "embed_dim": WIDTH, "ffn_embed_dim": HIDDEN, "layers": LAYERS}
    stack.update(attention_heads=HEADS, normalize_before=True, learned_pos=False, layerdrop=0, layers_to_keep=None)
    both = {f"{name}_{key}": value for name in ("encoder", "decoder") for key, value in stack.items()}
    flags = dict(zip(("encoder_norm_self", "encoder_norm_ff", "decoder_norm_self", "decoder_norm_ff"), norms))
    flags.update(encoder_spec_norm=False, dropout_type="none", dropout_gama=0.5, tbmf_wrapper=False)
    flags.update(arch="transformer_iwslt_de_en_v2", task="translation", source_lang="de", target_lang="en")
    flags.update(data="data-bin/iwslt14.tokenized.de-en.joined/", left_pad_source="True", left_pad_target="False")
    flags.update(raw_text=False, lazy_load=False, max_source_positions=1024, max_target_positions=1024)
    flags.update(upsample_primary=1, dropout=0.3, attention_dropout=0.1, activation_dropout=0.0, relu_dropout=0.1)
    flags.update(activation_fn="relu", share_all_embeddings=True, share_decoder_input_output_embed=True)
    flags.update(adaptive_softmax_cutoff=None, adaptive_softmax_dropout=0, adaptive_input=False)
    flags.update(no_token_positional_embeddings=False, no_cross_attention=False, cross_self_attention=False)
    flags.update(layer_wise_attention=False, decoder_input_dim=WIDTH, decoder_output_dim=WIDTH)
    flags.update(criterion="label_smoothed_cross_entropy", label_smoothing=0.1, optimizer="adam", adam_eps=1e-8)
    flags.update(adam_betas="(0.9, 0.98)", weight_decay=1e-4, lr=[0.0015], min_lr=1e-9, clip_norm=0.0)
    flags.update(lr_scheduler="inverse_sqrt", warmup_updates=8000, warmup_init_lr=1e-7, update_freq=[1])
    flags.update(max_tokens=4096, max_sentences=None, max_sentences_valid=None, max_tokens_valid=4096)
    flags.update(ddp_backend="no_c10d", early_stop=5, keep_last_epochs=5, save_dir="log/it's [here]", seed=1)
    flags.update(user_dir="/gone/plugin", fp16=False, sentence_avg=False, log_interval=50, max_update=0)
    # And what the fork's parser leaves in each checkpoint.
    flags.update(
        no_progress_bar=True, log_format="simple", tensorboard_logdir="", cpu=False, memory_efficient_fp16=False
    )
    flags.update(fp16_init_scale=128, fp16_scale_window=None, fp16_scale_tolerance=0.0, min_loss_scale=1e-4)
    flags.update(threshold_loss_scale=None, empty_cache_freq=0, tokenizer=None, bpe=None, num_workers=1)
    flags.update(skip_invalid_size_inputs_valid_test=False, required_batch_size_multiple=8, dataset_impl=None)
    flags.update(train_subset="train", valid_subset="valid", validate_interval=1, fixed_validation_seed=None)
    flags.update(disable_validation=False, curriculum=0, distributed_world_size=4, distributed_rank=0, device_id=0)
    flags.update(distributed_backend="nccl", distributed_init_method="tcp://localhost:17000", distributed_port=-1)
    flags.update(distributed_no_spawn=False, bucket_cap_mb=25, fix_batches_to_gpus=False, fast_stat_sync=False)
    flags.update(find_unused_parameters=False, max_epoch=0, use_bmuf=False, restore_file="checkpoint_last.pt")
    flags.update(reset_dataloader=False, reset_lr_scheduler=False, reset_meters=False, reset_optimizer=False)
    flags.update(optimizer_overrides="{}", save_interval=1, save_interval_updates=10000, keep_interval_updates=20)
    flags.update(no_save=False, no_epoch_checkpoints=False, no_last_checkpoints=False, no_save_optimizer_state=False)
    flags.update(best_checkpoint_metric="loss", maximize_best_checkpoint_metric=False, load_alignments=False)
    return Namespace(**{**both, **flags, **more})


def norm_entries(name, rand):
    entries = {"weight": 0.5 + rand(WIDTH), "bias": rand(WIDTH) - 0.5}
    if name == "power":
        entries["running_phi"] = 0.2 + rand(1, WIDTH, 1, 1)
        entries["ema_gz"] = rand(1, WIDTH, 1, 1) - 0.5
        entries["iters"] = torch.tensor([321])
    if name == "batch":
        entries.update(running_mean=rand(WIDTH) - 0.5, running_var=0.2 + rand(WIDTH))
        entries["num_batches_tracked"] = torch.tensor(321)
    return entries


def weights(args, words, target_words=None):
    """A state dict in the fork's layout, with random numbers."""
    generator = torch.Generator().manual_seed(5)
    state = OrderedDict()
    state._metadata = OrderedDict({"": {"version": 1}})  # torch's

    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    def linear(name, inputs, outputs):
        state[f"{name}.weight"] = (rand(outputs, inputs) - 0.5) * 2 / math.sqrt(inputs)
        state[f"{name}.bias"] = rand(outputs) - 0.5

    for stack, size in (("encoder", words), ("decoder", target_words or words)):
        option = vars(args).get
        norms = {"self": option(f"{stack}_norm_self"), "ff": option(f"{stack}_norm_ff")}
        state[f"{stack}.version"] = torch.tensor([3.0])
        state[f"{stack}.embed_tokens.weight"] = rand(size, WIDTH) / 4
        if option(f"{stack}_learned_pos"):
            state[f"{stack}.embed_positions.weight"] = rand(1024 + 2, WIDTH)
        else:
            state[f"{stack}.embed_positions._float_tensor"] = torch.zeros(1)
        sites = [("self_attn", norms["self"])]
        if stack == "decoder" and not args.no_cross_attention:
            sites.append(("encoder_attn", norms["self"]))
        for layer in range(option(f"{stack}_layers")):
            place = f"{stack}.layers.{layer}"
            for attention, norm in sites:
                for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
                    linear(f"{place}.{attention}.{part}", WIDTH, WIDTH)
                entries = norm_entries(norm, rand)
                state.update({f"{place}.{attention}_layer_norm.{key}": value for key, value in entries.items()})
            linear(f"{place}.fc1", WIDTH, HIDDEN)
            linear(f"{place}.fc2", HIDDEN, WIDTH)
            entries = norm_entries(norms["ff"], rand)
            state.update({f"{place}.final_layer_norm.{key}": value for key, value in entries.items()})
        if option(f"{stack}_normalize_before"):
            entries = norm_entries(norms["ff"], rand)
            state.update({f"{stack}.layer_norm.{key}": value for key, value in entries.items()})
    if args.share_all_embeddings:
        state["decoder.embed_tokens.weight"] = state["encoder.embed_tokens.weight"]
    elif not args.share_decoder_input_output_embed:
        state["decoder.embed_out"] = rand(target_words or words, WIDTH)
    return state


def checkpoint(args, words=50, target_words=None):
    history = {"criterion_name": "LabelSmoothedCrossEntropyCriterion", "optimizer_name": "FairseqAdam"}
    history.update(lr_scheduler_state={"best": None}, num_updates=321)
    return {
        "args": args,
        "model": weights(args, words, target_words),
        "optimizer_history": [history],
        "extra_state": {
            "train_iterator": {"epoch": 7, "iterations_in_epoch": 12},
            "val_loss": 4.2,
            "train_meters": {"loss": meters.AverageMeter(), "wall": meters.TimeMeter()},
        },
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.001}]},
    }


def save(state, path):
    """Saves as the fork does: torch's old file format, and meters of the module where fairseq 0.8 had them."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (meters.AverageMeter, meters.TimeMeter):
            patch.setattr(kind, "__module__", "fairseq.meters")
        torch.save(state, path, _use_new_zipfile_serialization=False)
    return path
