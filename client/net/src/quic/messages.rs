//! Messages on streams, framed as [`larder_protocol::peer`] says.

use larder_protocol::frame::MalformedMessage;
use larder_protocol::limits::MAX_PEER_MESSAGE_BYTES;
use larder_protocol::peer::Message;
use rkyv::util::AlignedVec;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

/// Why a message was not read or written.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The stream or the connection broke.
    #[error("cannot write to the stream")]
    Write(#[source] std::io::Error),
    /// The stream or the connection broke.
    #[error("cannot read from the stream")]
    Read(#[source] std::io::Error),
    /// The stream ended within a message.
    #[error("the stream ended within a message")]
    Cut,
    /// The bytes are no frame of this protocol.
    #[error("these bytes are no frame of a message")]
    NotAFrame,
    /// The message is longer than any that the other side may send.
    #[error("a message of {bytes} bytes; at most {most} are allowed")]
    TooLong {
        /// Bytes announced.
        bytes: usize,
        /// Bytes allowed.
        most: usize,
    },
    /// The bytes are no message.
    #[error(transparent)]
    Malformed(#[from] MalformedMessage),
}

/// Writes a message.
///
/// # Errors
/// [`MessageError`]: the stream is of no use any more.
///
/// # Cancel safety
/// Dropped, it may leave half a message on the stream: reset it.
pub async fn write_message<M: Message>(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &M,
) -> Result<(), MessageError> {
    write_encoded(stream, &message.encode()).await
}

/// Writes a message that is encoded already.
///
/// # Errors
/// [`MessageError`]: the stream is of no use any more.
///
/// # Cancel safety
/// Dropped, it may have written half a message: reset the stream.
pub async fn write_encoded(
    stream: &mut (impl AsyncWrite + Unpin),
    message: &[u8],
) -> Result<(), MessageError> {
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&(message.len() as u32).to_le_bytes());
    stream.write_all(&header).await.map_err(MessageError::Write)?;
    stream.write_all(message).await.map_err(MessageError::Write)
}

/// Reads a message; `None` if the stream ended before one began. Memory is taken as bytes arrive, not as they are
/// announced.
///
/// # Errors
/// [`MessageError`]: the stream is of no use any more.
///
/// # Cancel safety
/// Dropped, the future may have taken half a message off the stream: stop the stream.
pub async fn read_message<M: Message>(
    stream: &mut (impl AsyncRead + Unpin),
) -> Result<Option<M>, MessageError> {
    match read_header(stream, MAX_PEER_MESSAGE_BYTES).await? {
        Some(bytes) => read_body(stream, bytes).await.map(Some),
        None => Ok(None),
    }
}

/// Reads how many bytes the next message has; `None` if the stream ended before one began.
pub(super) async fn read_header(
    stream: &mut (impl AsyncRead + Unpin),
    most: usize,
) -> Result<Option<usize>, MessageError> {
    let (mut header, mut filled) = ([0; HEADER_BYTES], 0);
    while filled < HEADER_BYTES {
        match stream.read(&mut header[filled..]).await.map_err(MessageError::Read)? {
            0 if filled == 0 => return Ok(None),
            0 => return Err(MessageError::Cut),
            more => filled += more,
        }
    }
    let [a, b, c, d, zeros @ ..] = header;
    let bytes = u32::from_le_bytes([a, b, c, d]) as usize;
    match zeros {
        [0, 0, 0, 0] if bytes <= most => Ok(Some(bytes)),
        [0, 0, 0, 0] => Err(MessageError::TooLong { bytes, most }),
        _ => Err(MessageError::NotAFrame),
    }
}

/// Reads a message of `bytes` bytes.
pub(super) async fn read_body<M: Message>(
    stream: &mut (impl AsyncRead + Unpin),
    bytes: usize,
) -> Result<M, MessageError> {
    let (mut message, mut filled) = (AlignedVec::<16>::new(), 0);
    while filled < bytes {
        if filled == message.len() {
            // Grows to twice its size, but never beyond what was announced.
            let wanted = (2 * filled).max(FIRST_BYTES).min(bytes);
            message.reserve_exact(wanted - filled);
            message.resize(wanted, 0);
        }
        match stream.read(&mut message[filled..]).await.map_err(MessageError::Read)? {
            0 => return Err(MessageError::Cut),
            more => filled += more,
        }
    }
    Ok(M::decode(&message)?)
}

/// Memory that a message takes before its first byte has come.
const FIRST_BYTES: usize = 4 << 10;

const HEADER_BYTES: usize = 8;
