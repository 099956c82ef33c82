#!/bin/sh
# WMT14 English-German from the public files to binarised text, in runs/data/wmt14-en-de/binarised.
# What is missing is downloaded, what is done is kept. Arguments as `powernorm_fairseq prepare --help` says: --archive FILE ...,
# --workers N, --subwords sentencepiece. Paths are relative to the project's folder.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" -m powernorm_fairseq prepare wmt14-en-de "$@"
