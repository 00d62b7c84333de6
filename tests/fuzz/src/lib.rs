//! Fuzz targets: a pure function for each kind of bytes that Larder reads from others.
//!
//! A target takes any bytes and panics if a property does not hold. It returns whether the bytes were valid, so that a test can
//! check this for the examples. `tests/fuzz/run` runs the targets under cargo-fuzz. `tests/corpus.rs` runs them on stable, over
//! [`Target::examples`], damaged variants of these, and `corpus/`, which keeps every input that ever failed.

mod certificates;
mod disk;
mod message;
mod object;
mod peer;
mod session;
mod traces;

pub use certificates::certificates;
pub use disk::{disk_footers, disk_records};
pub use object::object_records;
pub use peer::peer_messages;
pub use session::session_frames;
pub use traces::trace_files;

/// One kind of bytes that Larder reads from others.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The target's name under cargo-fuzz, and its folder's name in the corpus.
    pub name: &'static str,
    /// Tests the properties for any bytes. Returns whether the bytes were valid.
    ///
    /// # Panics
    /// Panics if a property does not hold.
    pub run: fn(&[u8]) -> bool,
    /// Small valid inputs, made by the encoders.
    pub examples: fn() -> Vec<Vec<u8>>,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target { name: "session_frames", run: session_frames, examples: session::examples },
    Target { name: "peer_messages", run: peer_messages, examples: peer::examples },
    Target { name: "disk_records", run: disk_records, examples: disk::records },
    Target { name: "disk_footers", run: disk_footers, examples: disk::footers },
    Target { name: "object_records", run: object_records, examples: object::examples },
    Target { name: "certificates", run: certificates, examples: certificates::examples },
    Target { name: "trace_files", run: trace_files, examples: traces::examples },
];
