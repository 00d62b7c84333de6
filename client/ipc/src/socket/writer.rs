//! Frames to a socket.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use larder_protocol::frame::{FRAME_ALIGNMENT, FrameError, FrameHeader, HEADER_BYTES};
use larder_protocol::limits::{MAX_FRAME_BYTES, MAX_FRAME_DESCRIPTORS};
use larder_protocol::session::{Request, Response, encode_request, encode_response};
use rkyv::util::AlignedVec;
use rustix::cmsg_space;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Collects frames and sends them without blocking.
#[derive(Default)]
pub struct FrameWriter {
    /// Whole frames, one after the other.
    buffer: AlignedVec,
    /// Bytes of `buffer` that are sent.
    sent: usize,
    /// The frames with descriptors of which no byte is sent yet, in order.
    attached: VecDeque<Attached>,
}

/// The descriptors of one frame.
struct Attached {
    /// The frame's position in the buffer.
    start: usize,
    descriptors: Vec<OwnedFd>,
}

impl FrameWriter {
    /// A writer with nothing to send.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends a request. `number` is 0 if no answer is wanted.
    ///
    /// # Errors
    /// [`FrameError`] if the request is longer than a frame may be; then nothing is appended.
    pub fn push_request(&mut self, number: u64, request: &Request) -> Result<(), FrameError> {
        self.push_request_with(number, request, Vec::new())
    }

    /// Adds a request with its descriptors; they are closed once sent.
    ///
    /// # Errors
    /// [`FrameError`] if the request is longer than a frame may be or has too many descriptors; then nothing is appended.
    pub fn push_request_with(
        &mut self,
        number: u64,
        request: &Request,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), FrameError> {
        self.push(number, descriptors, |out| encode_request(request, out))
    }

    /// Appends the answer to request `number`, with the descriptors that belong to it; they are closed once sent.
    ///
    /// # Errors
    /// [`FrameError`] if the answer is longer than a frame may be or has too many descriptors; then nothing is appended.
    pub fn push_response(
        &mut self,
        number: u64,
        response: &Response,
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), FrameError> {
        self.push(number, descriptors, |out| encode_response(response, out))
    }

    /// Sends as much as the socket takes without blocking, whatever the socket's own mode. Returns whether all is sent; if
    /// not, call again when the socket is writable.
    ///
    /// # Errors
    /// The socket's errors, except `WouldBlock`. The stream may end within a frame: close the socket.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        while self.sent < self.buffer.len() {
            match self.send_once(socket) {
                Ok(bytes) => self.sent += bytes,
                Err(Errno::WOULDBLOCK) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        self.buffer.clear();
        if self.buffer.capacity() > KEPT_BUFFER_BYTES {
            self.buffer = AlignedVec::new();
        }
        self.sent = 0;
        Ok(true)
    }

    /// Bytes that wait to be sent.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.buffer.len() - self.sent
    }

    fn push(
        &mut self,
        number: u64,
        descriptors: Vec<OwnedFd>,
        encode: impl FnOnce(AlignedVec) -> AlignedVec,
    ) -> Result<(), FrameError> {
        if descriptors.len() > MAX_FRAME_DESCRIPTORS {
            let descriptors = u16::try_from(descriptors.len()).unwrap_or(u16::MAX);
            return Err(FrameError::TooManyDescriptors { descriptors });
        }
        self.drop_sent();
        let start = self.buffer.len();
        self.buffer.resize(start + HEADER_BYTES, 0);
        self.buffer = encode(mem::take(&mut self.buffer));
        let payload_bytes = self.buffer.len() - start - HEADER_BYTES;
        if payload_bytes > MAX_FRAME_BYTES {
            self.buffer.resize(start, 0);
            let payload_bytes = u32::try_from(payload_bytes).unwrap_or(u32::MAX);
            return Err(FrameError::TooLong { payload_bytes });
        }
        let header = FrameHeader {
            payload_bytes: payload_bytes as u32,
            descriptors: descriptors.len() as u16,
            request: number,
        };
        self.buffer[start..start + HEADER_BYTES].copy_from_slice(&header.encode());
        self.buffer.resize(start + HEADER_BYTES + header.padded_payload_bytes(), 0);
        if !descriptors.is_empty() {
            self.attached.push_back(Attached { start, descriptors });
        }
        Ok(())
    }

    /// Removes the sent bytes once they are most of the buffer, so that a slow reader does not make the buffer grow.
    fn drop_sent(&mut self) {
        let aligned = self.sent - self.sent % FRAME_ALIGNMENT;
        if aligned < SENT_BYTES_KEPT || aligned < self.buffer.len() / 2 {
            return;
        }
        self.buffer.copy_within(aligned.., 0);
        self.buffer.resize(self.buffer.len() - aligned, 0);
        self.sent -= aligned;
        for attached in &mut self.attached {
            attached.start -= aligned;
        }
    }

    /// Sends the bytes up to the next frame with descriptors, and the descriptors of the frame that these bytes begin with, if
    /// any.
    fn send_once(&mut self, socket: BorrowedFd<'_>) -> Result<usize, Errno> {
        let here = self.attached.front().filter(|attached| attached.start == self.sent);
        let next = self.attached.get(usize::from(here.is_some()));
        let end = next.map_or(self.buffer.len(), |attached| attached.start);
        let bytes = IoSlice::new(&self.buffer[self.sent..end]);
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let Some(Attached { descriptors, .. }) = here else {
            return retry_on_intr(|| sendmsg(socket, &[bytes], &mut SendAncillaryBuffer::default(), flags));
        };
        let borrowed: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_FRAME_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = control.push(SendAncillaryMessage::ScmRights(&borrowed));
        assert!(fits, "a frame has at most {MAX_FRAME_DESCRIPTORS} descriptors");
        let sent = retry_on_intr(|| sendmsg(socket, &[bytes], &mut control, flags))?;
        self.attached.pop_front();
        Ok(sent)
    }
}

/// A buffer that grew beyond this is given back once all of it is sent.
const KEPT_BUFFER_BYTES: usize = 512 << 10;

/// Sent bytes below this stay in the buffer until all of it is sent.
const SENT_BYTES_KEPT: usize = 64 << 10;
