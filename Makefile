# make demo   install caffepy with an MPI and train LeNet on two processes
# make test   install caffepy with its tests' needs, check the style and run the tests
# make fuzz   damage 200000 inputs of every format: no exception of Python's, signal, hang or growth
# make lint   ruff, its formatter and mypy alone
# make site   build the HTML documentation in build/site
# make proto  generate caffepy/formats/proto from proto/caffe.proto (an installation does this by itself)
# make clean  remove what these made
#
# Needs python3 (3.11 or later) with venv, and make; everything else comes from PyPI.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RANKS ?= 2
# Processes that run tests.
WORKERS ?= 2
COUNT ?= 200000
SEED ?= 1
SOLVER := models/lenet/solver.prototxt
DIGITS := models/lenet/mnist_train_lmdb/data.mdb models/lenet/mnist_test_lmdb/data.mdb
PACKAGING := pyproject.toml $(wildcard setup.py)
SCHEMA := proto/caffe.proto
# Folders too: one changes when a file in it is removed or renamed.
SOURCES := $(shell find caffepy -name __pycache__ -prune -o -print 2>/dev/null)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Open MPI refuses to run as root and to start more ranks than cores unless told otherwise; other users and MPIs ignore these.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_ALLOW_RUN_AS_ROOT := 1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
# Tests start hundreds of Pythons, each of which would compile caffepy again.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(abspath $(BIN)):$(PATH)

.PHONY: help demo test fuzz lint site proto clean
# Two pips at once would destroy each other's installation.
.NOTPARALLEL:

help:
	@sed -n 's/^# \(make .*\)/\1/p' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp $(DIGITS)
	mpirun -np $(RANKS) caffepy train --solver $(SOLVER)

test: lint
	pytest -n $(WORKERS) --dist worksteal

fuzz: $(VENV)/test.stamp
	python tests/fuzz/run.py --count $(COUNT) --seed $(SEED)

lint: $(VENV)/test.stamp
	ruff check .
	ruff format --check .
	mypy

# An environment of its own: tests and demonstration need nothing of it. A link that leads nowhere is an error.
site: $(VENV)-docs/stamp
	$(PYTHON) docs/site.py
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet --strict
	@echo build/site/index.html

proto: $(VENV)/test.stamp
	pip install --quiet --no-deps --editable .

clean:
	rm -rf $(VENV) $(VENV)-docs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f caffepy/formats/proto/caffe_pb2.py caffepy/formats/proto/caffe_pb2.pyi
	find caffepy docs models tests -name __pycache__ -prune -exec rm -rf {} +
	rm -rf models/lenet/*_lmdb
	rm -f models/lenet/*.caffemodel models/lenet/*.solverstate

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "caffepy needs Python 3.11 or later; this is $$($(PYTHON) --version): make PYTHON=/path/to/python3.x" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv or ensurepip; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A plain installation follows the sources; an editable one only the packaging files. Compiling every module of every
# package at once would take longer than the training; Python compiles those that are used.
ifneq ($(wildcard $(VENV)/test.stamp),)
$(VENV)/demo.stamp: $(VENV)/test.stamp
endif
$(VENV)/demo.stamp: $(BIN)/pip $(PACKAGING) $(SCHEMA) $(SOURCES)
	if [ ! -e $(VENV)/test.stamp ]; then $(REMOVE_PLAIN) && $(BIN)/pip install --quiet --no-compile '.[mpi]'; fi
	touch $@

$(VENV)/test.stamp: $(BIN)/pip $(PACKAGING) $(SCHEMA)
	$(REMOVE_PLAIN)
	$(BIN)/pip install --quiet --editable '.[mpi,test,dev]'
	touch $@

$(VENV)-docs/stamp: pyproject.toml | $(BIN)/pip
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet $$($(PYTHON) docs/site.py --requirements)
	touch $@

# Files that pip does not know, as older versions of caffepy left them, would make a package of their folder.
REMOVE_PLAIN = rm -rf $(VENV)/lib*/python*/site-packages/caffepy

# Order-only: a new installation makes no new digits. The command makes what is missing and keeps what is there.
$(DIGITS): | $(VENV)/demo.stamp
	caffepy data mnist --subset --to models/lenet
