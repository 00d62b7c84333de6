//! Messages on streams, framed as [`larder_protocol::peer`] says.

use larder_protocol::limits::MAX_PEER_MESSAGE_BYTES;
use larder_protocol::peer::{MalformedMessage, Message};
use quinn::{ReadExactError, RecvStream, SendStream, WriteError};
use rkyv::util::AlignedVec;

/// Why a message was not read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// The stream or the connection broke.
    #[error("the stream was not written")]
    Write(#[from] WriteError),
    /// The stream or the connection broke.
    #[error("the stream was not read")]
    Read(#[from] quinn::ReadError),
    /// The stream ended within a message.
    #[error("the stream ended within a message")]
    Cut,
    /// The bytes are no frame of this protocol, or too long.
    #[error("this is no frame of a message")]
    NotAFrame,
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
pub async fn write_message<M: Message>(stream: &mut SendStream, message: &M) -> Result<(), MessageError> {
    let message = message.encode();
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&(message.len() as u32).to_le_bytes());
    stream.write_all(&header).await?;
    stream.write_all(&message).await?;
    Ok(())
}

/// Reads a message; `None` where the stream ended before one began.
///
/// # Errors
/// [`MessageError`]: the stream is of no use any more.
///
/// # Cancel safety
/// Dropped, it may have taken half a message off the stream: stop it.
pub async fn read_message<M: Message>(stream: &mut RecvStream) -> Result<Option<M>, MessageError> {
    let mut header = [0; HEADER_BYTES];
    match stream.read_exact(&mut header).await {
        Ok(()) => {}
        Err(ReadExactError::FinishedEarly(0)) => return Ok(None),
        Err(error) => return Err(cut(error)),
    }
    let [a, b, c, d, zeros @ ..] = header;
    let bytes = u32::from_le_bytes([a, b, c, d]) as usize;
    if zeros != [0; 4] || bytes > MAX_PEER_MESSAGE_BYTES {
        return Err(MessageError::NotAFrame);
    }
    let mut message = AlignedVec::<16>::with_capacity(bytes);
    message.resize(bytes, 0);
    stream.read_exact(&mut message).await.map_err(cut)?;
    Ok(Some(M::decode(&message)?))
}

fn cut(error: ReadExactError) -> MessageError {
    match error {
        ReadExactError::FinishedEarly(_) => MessageError::Cut,
        ReadExactError::ReadError(error) => error.into(),
    }
}

const HEADER_BYTES: usize = 8;
