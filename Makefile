# build   bin/aisandbox with the guest programs in it
# demo    the demo; needs no account
# test    sets up what the tests need, then lint and every test
# bench   the benchmark table; PEERS=1 adds others from npm
# lint    gofmt, vet, staticcheck, tidy modules
# fuzz    every fuzz target for FUZZTIME
SHELL := /bin/bash
GO ?= go
MODULES := $(patsubst %/go.mod,%,$(shell git ls-files --cached --others --exclude-standard -- 'go.mod' '**/go.mod' | sed 's|^go.mod$$|./go.mod|'))
TESTED := $(filter-out tools,$(MODULES))
FUZZTIME ?= 5s
ARCHS ?= amd64 arm64

.PHONY: build demo test unit bench lint fuzz guests setup clean
.DEFAULT_GOAL := build

# Go decides what is up to date, so these are always asked for.
guests:
	@for arch in $(ARCHS); do \
		CGO_ENABLED=0 GOOS=linux GOARCH=$$arch $(GO) build -trimpath -ldflags "-s -w" \
			-o guest/programs/linux-$$arch ./cmd/aisandbox-guest || exit 1; \
	done

build: guests
	CGO_ENABLED=0 $(GO) build -trimpath -o bin/aisandbox ./cmd/aisandbox

# One guest is enough here, and half a minute less on a machine that never built it.
demo: ARCHS := $(shell $(GO) env GOARCH)
demo: build
	@scripts/setup-demo.sh
	bin/aisandbox demo

setup:
	@scripts/setup-test.sh

test: setup lint unit

# Two packages at a time: more would only make the time limits of the tests lie.
unit: build
	@set -e; for m in $(TESTED); do (cd $$m && $(GO) test -race -p 2 -timeout 15m ./...); done

bench: build
	$(GO) run ./internal/bench

lint: guests
	@files=$$(gofmt -l $$(git ls-files --cached --others --exclude-standard '*.go')); \
		if [ -n "$$files" ]; then echo "gofmt would change:"; echo "$$files"; exit 1; fi
	@cd tools && $(GO) build -o ../bin/staticcheck honnef.co/go/tools/cmd/staticcheck
	@set -e; for m in $(MODULES); do (cd $$m && $(GO) mod tidy -diff); done
	@set -e; for m in $(TESTED); do (cd $$m && $(GO) vet ./... && $(CURDIR)/bin/staticcheck ./...); done

fuzz:
	@set -e; for m in $(TESTED); do cd $(CURDIR)/$$m; \
		for p in $$($(GO) list ./...); do \
			for f in $$($(GO) test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
				echo "$$p $$f"; $(GO) test -run '^$$' -fuzz "^$$f\$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 10x $$p; \
			done; \
		done; \
	done

clean:
	rm -rf bin guest/programs/linux-*
