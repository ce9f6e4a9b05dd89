# make up      everything, from a fresh checkout to a served model
# make demo    the same to look at, with simulated engines
# make test    everything that CI runs
.DEFAULT_GOAL := help
SHELL := /bin/bash
TRACES ?= 0
ARGS ?=

.PHONY: help up demo test check setup router-env engine-env quantizer-env checkpoints clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

up: ## set up what is missing, start three engines and the router (TRACES=1: a trace viewer too; ARGS: for qarr up)
	@scripts/up "$(TRACES)" $(ARGS)

demo: ## the router and its page in front of simulated engines: no model, no vLLM (ARGS: for qarr demo)
	@scripts/setup router
	@.venv/bin/qarr demo $(ARGS)

test: ## lint, types, unit tests, and tests on real engines
	@scripts/test

check: ## lint and types only
	@scripts/check

setup: ## make all three environments and the checkpoints, start nothing
	@scripts/setup router engine quantizer
	@.venv/bin/qarr model prepare

router-env: ## .venv: the router and the command
	@scripts/setup router

engine-env: ## .venv-engine: vLLM
	@scripts/setup engine

quantizer-env: ## .venv-quantizer: llm-compressor
	@scripts/setup quantizer

checkpoints: ## the model's three checkpoints
	@scripts/setup router quantizer
	@.venv/bin/qarr model prepare

clean: ## remove the environments' links and .venv; what is cached stays
	rm -rf .venv .venv-engine .venv-quantizer .venv-ray
