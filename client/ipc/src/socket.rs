//! Frames on a Unix stream socket, with the descriptors that belong to them; no runtime, both ends.
//!
//! Which frame a descriptor belongs to follows from two properties of Linux (`unix_stream_sendmsg` and
//! `unix_stream_read_generic` in `net/unix/af_unix.c`, and unix(7)):
//!
//! 1. The descriptors of one `sendmsg` travel with the first byte that it sends. [`FrameWriter`] starts a new `sendmsg` at every
//!    frame that has descriptors, so they travel with the frame's first byte.
//! 2. One `recvmsg` returns the descriptors of at most one `sendmsg`: it may begin with bytes sent before them, and ends
//!    with bytes sent with them. [`FrameReader`] remembers the stretch of the stream that each `recvmsg` covered; the
//!    frame that announces the descriptors must start in it.

mod reader;
mod writer;

pub use reader::{Frame, FrameReader, MAX_GREETING_BYTES, ReceiveError};
pub use writer::FrameWriter;
