"""One file a contender; each sets CONTENDER. Loaded by `harness.worker`, never imported together."""
