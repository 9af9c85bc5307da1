# The verbs of the house. Each target is one line of help and does one thing, or fails with a sentence.
# Set-up happens by itself: every target that needs it asks services/setup, which does only what is missing.

SHELL := /bin/sh
OUTRIGGER := .venv/bin/outrigger
PYTEST := .venv/bin/python -m pytest
ARGS ?=
MINUTES ?= 10

# PYTHON=python3.12 chooses one; otherwise the first of these that starts and has a fitting version is taken.
PYTHON ?=
FIND_PYTHON = python=$(PYTHON); if [ -z "$$python" ]; then python=python3; \
	for each in python3 python3.13 python3.12 python3.11; do \
	if $$each -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; \
	then python=$$each; break; fi; done; fi
SET_UP = @$(FIND_PYTHON); $$python -m services.setup

.DEFAULT_GOAL := help
.PHONY: help setup run demo test test-system check laws bench bench-rpc verify drill soak up down status logs chat doctor \
	split pages dashboards service docs clean distclean

help: ## print this list
	@echo "Outrigger: one model on two devices. Targets of this Makefile:"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' Makefile
	@echo "Variables: ARGS=\"...\" for the command behind a target, PYTHON=python3.12 for the set-up,"
	@echo "OUTRIGGER_WHEEL_DIR=folder where compiled wheels are shared between checkouts, OUTRIGGER_MODEL=model.gguf."

setup: ## make .venv, compile the engine once (about five minutes), fetch the small model
	$(SET_UP)

run: ## set up, then serve in the foreground: gateway, mac, broker, bridge and a worker on this machine
	$(SET_UP) --quiet
	@exec $(OUTRIGGER) run $(ARGS)

test: ## set up, fetch the models of the tests (93 and 238 MB, once), run the tests
	$(SET_UP) --quiet --model gemma3-270m
	@$(PYTEST) $(ARGS) || { code=$$?; echo "make test: failed (pytest exit code $$code)" >&2; exit $$code; }

test-system: ## run the tests that need node, npm, prometheus, docker-compose (four minutes)
	$(SET_UP) --quiet
	@command -v node >/dev/null && command -v npm >/dev/null || { echo "make test-system: node and npm are missing;" \
	"install them: apt-get install nodejs npm (on a Mac: brew install node)" >&2; exit 2; }
	@command -v prometheus >/dev/null && command -v promtool >/dev/null || { echo "make test-system: prometheus is missing;" \
	"install it: apt-get install prometheus (on a Mac: brew install prometheus)" >&2; exit 2; }
	@command -v docker-compose >/dev/null || { echo "make test-system: docker-compose is missing;" \
	"install it: apt-get install docker-compose (on a Mac: brew install docker-compose)" >&2; exit 2; }
	@[ -d .outrigger/node/node_modules/zeromq ] || npm install --loglevel=error --no-audit --no-fund \
	--prefix .outrigger/node zeromq@6 @msgpack/msgpack@3
	@[ -d .outrigger/node/node_modules/@grafana/schema ] || npm install --loglevel=error --no-audit --no-fund \
	--prefix .outrigger/node @grafana/schema@13.2.3 typescript@5
	@$(PYTEST) -m system $(ARGS) tests/system

check: ## format, lint, types and the architecture test
	$(SET_UP) --quiet --with dev
	@.venv/bin/ruff format --check . || { echo "make check: run .venv/bin/ruff format ." >&2; exit 1; }
	@.venv/bin/ruff check .
	@.venv/bin/mypy
	@$(PYTEST) -q tests/test_architecture.py

laws: ## the laws of the house as property tests: split, merge, wire, grid
	$(SET_UP) --quiet
	@$(PYTEST) $(ARGS) tests/laws

bench: ## measure engine, split, link, pages, attention and held pages on this machine (ARGS="--quick" for minutes)
	$(SET_UP) --quiet
	@$(OUTRIGGER) bench engine $(ARGS)
	@$(OUTRIGGER) bench split $(ARGS)
	@$(OUTRIGGER) bench link $(ARGS)
	@$(OUTRIGGER) bench pages $(ARGS)
	@$(OUTRIGGER) bench attend $(ARGS)
	@$(OUTRIGGER) bench held $(ARGS)

bench-rpc: ## llama.cpp's own RPC backend beside ours (optional; compiles it once, ten minutes)
	$(SET_UP) --quiet
	@$(OUTRIGGER) bench rpc $(ARGS)

verify: ## same tokens with a worker, without one, with one that dies mid-read; hostile frames; Core ML pages
	$(SET_UP) --quiet --model gemma3-270m
	@$(OUTRIGGER) verify $(ARGS)
	@$(OUTRIGGER) verify $(ARGS) --fuzz
	$(SET_UP) --quiet --with coreml
	@$(OUTRIGGER) verify $(ARGS) --frozen
	@$(PYTEST) -m coreml tests/device/coreml

split: ## write a worker's part of a model: make split ARGS="MODEL.gguf TAIL.gguf -L 40"
	$(SET_UP) --quiet
	@$(OUTRIGGER) split $(ARGS)

demo: ## read a long document alone and with a worker, and cut the cable once (two minutes)
	$(SET_UP) --quiet
	@$(OUTRIGGER) demo $(ARGS)

drill: ## faults on purpose, one after the other: cut, freeze, corrupt, kill (ARGS=" " for your own model)
	$(SET_UP) --quiet
	@$(OUTRIGGER) drill $(if $(ARGS),$(ARGS),--quick)

soak: ## MINUTES=10 of mixed requests under random faults; report with plots in results/soak.html
	$(SET_UP) --quiet
	@.venv/bin/python -c 'import matplotlib' 2>/dev/null || { echo "make soak: the plots need matplotlib:" \
	".venv/bin/pip install 'outrigger[trace]' (make test brings it, too)" >&2; exit 2; }
	@mkdir -p results
	@$(OUTRIGGER) soak --minutes $(MINUTES) --report results/soak.html $(ARGS)

up: ## set up, then serve in the background until `make down`
	$(SET_UP) --quiet
	@exec $(OUTRIGGER) up $(ARGS)

down: ## stop what runs; answers being written get ten seconds
	$(SET_UP) --quiet
	@exec $(OUTRIGGER) down $(ARGS)

status: ## each process: state, pid, uptime, restarts, last error
	$(SET_UP) --quiet
	@exec $(OUTRIGGER) status $(ARGS)

logs: ## follow the logs of all processes: make logs ARGS="mac -n 200" shows one
	$(SET_UP) --quiet
	@exec $(OUTRIGGER) logs $(if $(ARGS),$(ARGS),-f)

chat: ## talk to the model that `make run` serves, in the terminal
	$(SET_UP) --quiet
	@exec $(OUTRIGGER) chat $(ARGS)

doctor: ## examine this machine, the cable and the worker; each finding with its remedy
	$(SET_UP) --quiet
	@exec $(OUTRIGGER) doctor $(ARGS)

pages: ## page programs, old keys as Core ML programs: make pages ARGS="verify"
	$(SET_UP) --quiet --with coreml
	@$(OUTRIGGER) pages $(if $(ARGS),$(ARGS),--help)

dashboards: ## write Grafana's dashboards anew from monitoring/panels.py
	$(SET_UP) --quiet --with dashboards
	@.venv/bin/python -m monitoring.make_dashboards

service: ## install as a service of this machine: make service ARGS=--dry-run shows it
	$(SET_UP) --quiet
	@exec $(OUTRIGGER) service install $(ARGS)

docs: ## check that every link of the documents leads somewhere, and list the documents
	$(SET_UP) --quiet
	@$(PYTEST) -q tests/test_docs.py
	@for each in README.md docs/*.md; do printf '  %-26s %s\n' "$$each" "$$(sed -n '1s/^# //p' "$$each")"; done

clean: ## remove .venv, results, models, caches and logs; keeps the compiled wheels
	@rm -rf .venv results build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@for each in .outrigger/*; do [ "$$each" = .outrigger/wheels ] || rm -rf "$$each"; done
	@find common services device tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## clean, and the compiled wheels too
	@rm -rf .outrigger
