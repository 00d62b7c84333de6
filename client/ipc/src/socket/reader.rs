//! Frames from a socket.

use std::collections::VecDeque;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};

use larder_protocol::frame::{FrameError, FrameHeader, HEADER_BYTES};
use larder_protocol::limits::{MAX_FRAME_BYTES, MAX_FRAME_DESCRIPTORS};
use rkyv::util::AlignedVec;
use rustix::cmsg_space;
use rustix::io::retry_on_intr;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

/// Cuts a socket's bytes into frames.
///
/// Call [`FrameReader::receive`] when the socket is readable, then [`FrameReader::next_frame`] until it returns no frame. After
/// an error no later byte can be trusted: close the socket.
#[derive(Default)]
pub struct FrameReader {
    /// The bytes up to its length are initialized. It grows with the arriving bytes, up to [`LARGEST_BUFFER_BYTES`].
    buffer: AlignedVec,
    /// The part of `buffer` that was received and not yet returned. It starts at a frame.
    unread: Range<usize>,
    /// Position of `buffer` in the stream.
    position: u64,
    /// Descriptors that no frame has claimed yet, grouped by the `recvmsg` that brought them.
    unclaimed: VecDeque<Batch>,
    /// Whether only small frames without descriptors may come.
    takes_only_greetings: bool,
}

/// A frame, in place in its reader's buffer.
#[derive(Debug)]
pub struct Frame<'a> {
    /// The header of the message.
    pub header: FrameHeader,
    /// The message; starts at a multiple of 16 bytes in memory.
    pub payload: &'a [u8],
    /// The descriptors that the header announces, close-on-exec.
    pub descriptors: Vec<OwnedFd>,
}

/// Why no more frames can be read from a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiveError {
    /// The bytes are no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A frame announces another number of descriptors than the number that came with it.
    #[error("a frame announces {announced} descriptors, but {found} came with the frame")]
    WrongDescriptors {
        /// Number that its header announces.
        announced: u16,
        /// Number of descriptors that came.
        found: usize,
    },
    /// Descriptors came that no frame announced.
    #[error("{found} descriptors came that no frame announces")]
    StrayDescriptors {
        /// Number of descriptors that came.
        found: usize,
    },
    /// A frame is longer than any greeting, and came before the session is open.
    #[error(
        "a frame of {payload_bytes} bytes before a session is open; at most {MAX_GREETING_BYTES} are allowed"
    )]
    TooLongAGreeting {
        /// Bytes announced.
        payload_bytes: u32,
    },
}

/// The descriptors that one `recvmsg` brought.
struct Batch {
    /// The stretch of the stream that the `recvmsg` covered.
    stretch: Range<u64>,
    descriptors: Vec<OwnedFd>,
}

impl FrameReader {
    /// A reader that has not received anything yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A reader for an unknown process. Until [`FrameReader::greeted`] it takes frames of at most [`MAX_GREETING_BYTES`], and no
    /// descriptors.
    #[must_use]
    pub fn of_a_stranger() -> Self {
        Self { takes_only_greetings: true, ..Self::default() }
    }

    /// From now on, frames may have any length up to the limit, and descriptors.
    pub fn greeted(&mut self) {
        self.takes_only_greetings = false;
    }

    /// Takes the descriptors that came and that no frame claimed, also those after which the reader gave an error. Closing a
    /// descriptor of a stranger may block.
    pub fn take_unclaimed(&mut self) -> Vec<OwnedFd> {
        self.unclaimed.drain(..).flat_map(|batch| batch.descriptors).collect()
    }

    /// Receives once: as much as has arrived and fits into the buffer. Blocks if the socket blocks. Returns the number of
    /// received bytes, 0 at the end of the stream.
    ///
    /// # Errors
    /// The socket's errors, including `WouldBlock`; `InvalidData` if descriptors were lost on the way or more than two frames'
    /// worth are unclaimed; `InvalidInput` if the buffer is full of frames that nobody took.
    pub fn receive(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.receive_with(socket, RecvFlags::empty())
    }

    /// As [`FrameReader::receive`], but never blocks, even if the socket does.
    ///
    /// # Errors
    /// As [`FrameReader::receive`].
    pub fn receive_now(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        self.receive_with(socket, RecvFlags::DONTWAIT)
    }

    /// The next frame that has arrived completely.
    ///
    /// # Errors
    /// [`ReceiveError`] if the stream is no sequence of frames, or its descriptors differ from the announced ones.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, ReceiveError> {
        let start = self.position + self.unread.start as u64;
        if let Some(batch) = self.unclaimed.front()
            && batch.stretch.end <= start
        {
            return Err(ReceiveError::StrayDescriptors { found: batch.descriptors.len() });
        }
        let Some(header) = self.header()? else { return Ok(None) };
        if self.takes_only_greetings && header.payload_bytes > MAX_GREETING_BYTES {
            return Err(ReceiveError::TooLongAGreeting { payload_bytes: header.payload_bytes });
        }
        let frame_bytes = HEADER_BYTES + header.padded_payload_bytes();
        if self.unread.len() < frame_bytes {
            return Ok(None);
        }
        let descriptors = self.claim(start, header.descriptors)?;
        let payload = self.unread.start + HEADER_BYTES;
        self.unread.start += frame_bytes;
        let payload = &self.buffer[payload..payload + header.payload_bytes as usize];
        Ok(Some(Frame { header, payload, descriptors }))
    }

    fn receive_with(&mut self, socket: BorrowedFd<'_>, flags: RecvFlags) -> io::Result<usize> {
        self.make_room()?;
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_SENT_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let room = &mut self.buffer[self.unread.end..];
        let received = retry_on_intr(|| {
            recvmsg(socket, &mut [IoSliceMut::new(room)], &mut control, flags | RecvFlags::CMSG_CLOEXEC)
        })?;
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                descriptors.extend(rights);
            }
        }
        let from = self.position + self.unread.end as u64;
        self.unread.end += received.bytes;
        if !descriptors.is_empty() {
            let stretch = from..from + received.bytes as u64;
            self.unclaimed.push_back(Batch { stretch, descriptors });
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(invalid("descriptors were lost: too many at once, or this process may open no more"));
        }
        let unclaimed: usize = self.unclaimed.iter().map(|batch| batch.descriptors.len()).sum();
        if unclaimed > 0 && self.takes_only_greetings {
            return Err(invalid("descriptors came before a session is open"));
        }
        if unclaimed > MAX_UNCLAIMED_DESCRIPTORS {
            return Err(invalid("more descriptors came than any two frames can announce"));
        }
        Ok(received.bytes)
    }

    /// Moves the unread bytes to the front. If they fill the buffer and are less than the frame that they begin, the buffer
    /// doubles: it never grows to the length that a header merely announces.
    fn make_room(&mut self) -> io::Result<()> {
        self.position += self.unread.start as u64;
        if self.unread.is_empty() && self.buffer.len() > KEPT_BUFFER_BYTES {
            self.buffer = AlignedVec::new();
        } else {
            self.buffer.copy_within(self.unread.clone(), 0);
        }
        self.unread = 0..self.unread.len();
        let frame_bytes = match self.header() {
            Ok(Some(header)) => HEADER_BYTES + header.padded_payload_bytes(),
            Ok(None) => HEADER_BYTES,
            Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
        };
        if self.unread.end < self.buffer.len() {
            return Ok(());
        }
        if frame_bytes <= self.buffer.len() {
            let message = "take the frames that are here before receiving more";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let grown = (2 * self.buffer.len()).clamp(FIRST_BUFFER_BYTES, LARGEST_BUFFER_BYTES);
        self.buffer.resize(grown, 0);
        Ok(())
    }

    /// The header of the frame that `unread` starts with, once the header has arrived.
    fn header(&self) -> Result<Option<FrameHeader>, FrameError> {
        self.buffer[self.unread.clone()].first_chunk().map(FrameHeader::decode).transpose()
    }

    /// The descriptors of the frame that starts at `start` in the stream.
    fn claim(&mut self, start: u64, announced: u16) -> Result<Vec<OwnedFd>, ReceiveError> {
        if announced == 0 {
            return Ok(Vec::new());
        }
        let came = self.unclaimed.front().filter(|batch| batch.stretch.contains(&start));
        let found = came.map_or(0, |batch| batch.descriptors.len());
        if found != usize::from(announced) {
            return Err(ReceiveError::WrongDescriptors { announced, found });
        }
        Ok(self.unclaimed.pop_front().map_or_else(Vec::new, |batch| batch.descriptors))
    }
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Enough for all but the longest chains.
const FIRST_BUFFER_BYTES: usize = 16 << 10;

/// A buffer that grew beyond this is given back once it is empty.
const KEPT_BUFFER_BYTES: usize = 512 << 10;

/// The most bytes of a greeting. The longest part of a greeting is the client's name, at most 256 bytes.
pub const MAX_GREETING_BYTES: u32 = 4 << 10;

/// One frame of the largest size.
const LARGEST_BUFFER_BYTES: usize = HEADER_BYTES + MAX_FRAME_BYTES;

/// A frame that has partly arrived may have its descriptors here, and so may the frame after it.
const MAX_UNCLAIMED_DESCRIPTORS: usize = 2 * MAX_FRAME_DESCRIPTORS;

/// The kernel's limit for one `sendmsg` (`SCM_MAX_FD`). The kernel closes descriptors for which there is no room, on the receiving
/// thread, and a close may block.
const MAX_SENT_DESCRIPTORS: usize = 253;
