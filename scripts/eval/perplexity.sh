#!/bin/sh
# Perplexity (or bits per character) of a checkpoint, such as --path runs/lm/ptb/power/seed1/checkpoints/checkpoint_best.pt
# --context-window 31. Arguments as `powernorm_fairseq perplexity --help` says. Paths are relative to the project's folder.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" -m powernorm_fairseq perplexity "$@"
