//! Tests of the actor.
