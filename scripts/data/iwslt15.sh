#!/bin/sh
# IWSLT15 English-Vietnamese from the public files to binarised text, in runs/data/iwslt15-en-vi/binarised.
# What is missing is downloaded, what is done is kept. Arguments as `powernorm_fairseq prepare --help` says: --archive FILE ...,
# --workers N, --subwords sentencepiece. Paths are relative to the project's folder.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" -m powernorm_fairseq prepare iwslt15-en-vi "$@"
