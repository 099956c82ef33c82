#!/bin/sh
# enwik8, byte by byte, to binarised text in runs/data/enwik8/binarised. What is missing is downloaded, what is done is kept.
# Arguments as `powernorm_fairseq prepare --help` says, such as --archive FILE.
# Paths are relative to the project's folder.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" -m powernorm_fairseq prepare enwik8 "$@"
