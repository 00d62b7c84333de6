//! What the directory costs a chunk.
