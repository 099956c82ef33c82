#!/bin/sh
# Penn Treebank, from your own copy, to binarised text in runs/data/ptb/binarised. What is done is kept.
# Arguments as `powernorm_fairseq prepare --help` says, such as --archive ptb.train.txt ptb.valid.txt ptb.test.txt.
# Paths are relative to the project's folder.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" -m powernorm_fairseq prepare ptb "$@"
