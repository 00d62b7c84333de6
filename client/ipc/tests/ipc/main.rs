//! Frames, descriptors and memory between two processes.
#![expect(clippy::unwrap_used, reason = "what fails in a test's fixture fails the test")]

mod mapping;
mod socket;
