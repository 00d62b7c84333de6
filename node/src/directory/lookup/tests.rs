//! Tests of the lookup.
