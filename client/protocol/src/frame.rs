//! Frames: the form of messages on a session's socket.
//!
//! | bytes | what |
//! | --- | --- |
//! | 0..4 | `u32` bytes of the payload that follows, at most [`MAX_FRAME_BYTES`] |
//! | 4..6 | `u16` descriptors that came with the frame, at most [`MAX_FRAME_DESCRIPTORS`] |
//! | 6..8 | `u16` zero |
//! | 8..16 | `u64` request number: an answer bears the number of its request; 0 if no answer is wanted |
//! | 16.. | the message in rkyv, then zeros up to a multiple of 16 bytes (not counted above) |
//!
//! All numbers are little-endian. Headers and payloads start at multiples of 16 bytes, so a receiver that reads into an
//! aligned buffer reads messages in place.

use crate::limits::{MAX_FRAME_BYTES, MAX_FRAME_DESCRIPTORS};

/// Bytes of a frame's header.
pub const HEADER_BYTES: usize = 16;

/// Alignment of headers and payloads in the stream.
pub const FRAME_ALIGNMENT: usize = 16;

/// The header before a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Bytes of the message.
    pub payload_bytes: u32,
    /// Descriptors that belong to the message.
    pub descriptors: u16,
    /// Number of the request, or of the request that the message answers; 0 if no answer is wanted.
    pub request: u64,
}

/// Why bytes are not a frame. Nothing that follows on the stream can be trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The payload is longer than a frame's may be.
    #[error("a frame of {payload_bytes} bytes; at most {MAX_FRAME_BYTES} are allowed")]
    TooLong {
        /// Bytes announced.
        payload_bytes: u32,
    },
    /// More descriptors than a frame carries.
    #[error("a frame with {descriptors} descriptors; at most {MAX_FRAME_DESCRIPTORS} are allowed")]
    TooManyDescriptors {
        /// Descriptors announced.
        descriptors: u16,
    },
    /// The reserved field is not zero: not a Larder session at all.
    #[error("not a Larder session frame")]
    NotAFrame,
}

/// The bytes are no message of the expected type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the frame's bytes are no message of this version of the protocol")]
pub struct MalformedMessage;

impl FrameHeader {
    /// The header as bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&self.payload_bytes.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.descriptors.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.request.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`FrameError`] if a limit is passed or the bytes are no header.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let [a, b, c, d, e, f, g, h, request @ ..] = *bytes;
        let payload_bytes = u32::from_le_bytes([a, b, c, d]);
        let descriptors = u16::from_le_bytes([e, f]);
        if [g, h] != [0, 0] {
            return Err(FrameError::NotAFrame);
        }
        if payload_bytes as usize > MAX_FRAME_BYTES {
            return Err(FrameError::TooLong { payload_bytes });
        }
        if usize::from(descriptors) > MAX_FRAME_DESCRIPTORS {
            return Err(FrameError::TooManyDescriptors { descriptors });
        }
        Ok(Self { payload_bytes, descriptors, request: u64::from_le_bytes(request) })
    }

    /// Bytes of the payload with its padding.
    #[must_use]
    pub fn padded_payload_bytes(&self) -> usize {
        (self.payload_bytes as usize).next_multiple_of(FRAME_ALIGNMENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_the_wire() {
        let header = FrameHeader { payload_bytes: 1_000, descriptors: 3, request: u64::MAX - 1 };
        assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
        assert_eq!(header.padded_payload_bytes(), 1_008);
    }

    #[test]
    fn headers_beyond_the_limits_are_refused() {
        let header = FrameHeader { payload_bytes: 1, descriptors: 0, request: 1 };
        let long = FrameHeader { payload_bytes: MAX_FRAME_BYTES as u32 + 1, ..header };
        assert!(matches!(FrameHeader::decode(&long.encode()), Err(FrameError::TooLong { .. })));
        let many = FrameHeader { descriptors: MAX_FRAME_DESCRIPTORS as u16 + 1, ..header };
        assert!(matches!(FrameHeader::decode(&many.encode()), Err(FrameError::TooManyDescriptors { .. })));
        assert_eq!(FrameHeader::decode(b"GET / HTTP/1.1\r\n"), Err(FrameError::NotAFrame));
    }
}
