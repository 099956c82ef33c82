#!/bin/sh
# Small models with several norms on the sample text, and their table. Arguments as `powernorm_fairseq demo --help` says.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-.venv/bin/python}" -m powernorm_fairseq demo "$@"
