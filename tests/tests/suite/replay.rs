//! Replays of real traces, held against a model that is computed here.
