"""What the norms are meant to reach, and whether a measurement does."""

from typing import Any, Dict, List

CACHED = 4 << 20  # bytes of an input up to which evaluation is said to run within the cache
SHAPES = [(512, 512), (4096, 512), (4096, 1024), (16384, 512)]


def target(name: str, limit: float, value: float, at_most: bool = True) -> Dict[str, Any]:
    """A target and whether it is met, as it goes into a record."""
    met = value <= limit if at_most else value >= limit
    return {"name": name, "limit": limit, "value": float(f"{value:.4g}"), "at_most": at_most, "met": met}


def of_norm(record: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The targets of a measurement of ``benchmarks.norms``: for one thread of a CPU and four shapes."""
    if record["device"] != "cpu" or record["threads"] != 1 or (record["rows"], record["channels"]) not in SHAPES:
        return []
    found = []
    norm, path, mode = record["norm"], record["path"], record["mode"]
    ratio = record["ratio"]["median"]
    if norm == "power" and path == "native" and mode == "train":
        found.append(target("time / LayerNorm", 1.15 if "warm-up" in record["variant"] else 0.95, ratio))
    if norm == "power" and path == "native" and mode == "eval":
        cached = record["rows"] * record["channels"] * record["itemsize"] <= CACHED
        found.append(target("time / LayerNorm", 0.85 if cached else 1.05, ratio))
    if norm == "ada" and path == "native" and mode == "train":
        found.append(target("time / LayerNorm", 0.9, ratio))
    if norm == "batch" and path == "native" and mode == "train" and "BatchNorm1d" in record["against"]:
        found.append(target("time / BatchNorm1d", 1.0, record["against"]["BatchNorm1d"]["median"]))
    if norm == "power" and path == "torch" and mode == "train":
        found.append(target("time / LayerNorm", 4.5, ratio))
        if "peak_memory" in record:
            found.append(target("peak memory / input", 2.2, record["peak_memory"]))
    if (norm, path, mode, record["variant"]) == ("power", "naive", "train", "") and "fused" in record["against"]:
        found.append(target("naive / fused", 25, record["against"]["fused"]["median"], at_most=False))
    return found
