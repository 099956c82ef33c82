#!/bin/sh
# BLEU of translations, such as --kind tokenised --generated FILE; with --compare, whether systems differ. Arguments as
# `powernorm_fairseq score --help` says. Paths are relative to the project's folder.
set -eu
cd "$(dirname "$0")/../.."
exec "${PYTHON:-.venv/bin/python}" -m powernorm_fairseq score "$@"
