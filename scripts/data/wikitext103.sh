#!/bin/sh
# WikiText-103 to binarised text in runs/data/wikitext-103/binarised. What is missing is downloaded, what is done is kept.
# Arguments as `powernorm_fairseq prepare --help` says, such as --archive FILE.
# Paths are relative to the project's folder.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" -m powernorm_fairseq prepare wikitext-103 "$@"
