"""Sequences that fork: everything that a sequence owns, as one value.

`branch` is that value and what can be done to it; `samplers` are samplers as values, their random generators included;
`tree` keeps branches behind handles that go stale safely, with their parents and children (`slots` is the table behind it);
`store` feeds, samples and steps them on a model, through `forward`. Imported by path, not from here.
"""
