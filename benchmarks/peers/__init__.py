"""One file a contender; each sets FORMS. Loaded by `harness.worker`, never imported together."""
