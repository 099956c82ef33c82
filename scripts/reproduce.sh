#!/bin/sh
# One row of a published table, from raw text to its number:
#   scripts/reproduce.sh iwslt14_de_en/power
#   SEEDS="1 2 3" GPUS=8 scripts/reproduce.sh wmt14_en_de/power --dry-run
# Other arguments as `powernorm_fairseq reproduce --help` says.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" -m powernorm_fairseq reproduce "$@" ${SEEDS:+--seeds $SEEDS} ${GPUS:+--gpus $GPUS}
