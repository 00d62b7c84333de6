//! A socket whose reader takes little at a time.
//!
//! actix-http decodes everything that it has read: 6 KB of memory for a request of 20 bytes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A socket that gives its reader at most [`SIP_BYTES`] at a time.
///
/// A reader that decodes all that it has got, as actix-http does up to 128 KiB, makes some 6 KB out of each request of 20 bytes
/// that a client sent ahead. It checks the number of waiting requests only between two reads.
#[derive(Debug)]
pub(super) struct Sips<S> {
    socket: S,
    /// Whether the last read returned bytes.
    has_sipped: bool,
}

impl<S> Sips<S> {
    pub(super) fn new(socket: S) -> Self {
        Self { socket, has_sipped: false }
    }

    pub(super) fn get(&self) -> &S {
        &self.socket
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Sips<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if std::mem::take(&mut self.has_sipped) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut sip = [0; SIP_BYTES];
        let room = buffer.remaining().min(SIP_BYTES);
        let mut sip = ReadBuf::new(&mut sip[..room]);
        ready!(Pin::new(&mut self.socket).poll_read(context, &mut sip))?;
        buffer.put_slice(sip.filled());
        self.has_sipped = !sip.filled().is_empty();
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Sips<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(context, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(context)
    }
}

/// Room for few requests, as a request's head has some 200 bytes. A body of 16 MiB takes some 30,000 sips.
const SIP_BYTES: usize = 512;

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::task::noop_waker_ref;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    #[tokio::test]
    async fn a_reader_gets_one_sip_a_turn_and_in_the_end_all_of_it() {
        let sent: Vec<u8> = (0..2_000_u32).map(|i| i as u8).collect();
        let (mut theirs, ours) = duplex(4_096);
        theirs.write_all(&sent).await.unwrap();
        drop(theirs);
        let mut sips = Sips::new(ours);
        let mut context = Context::from_waker(noop_waker_ref());
        let mut first = [0; 4_096];
        let mut buffer = ReadBuf::new(&mut first);
        assert!(pin!(&mut sips).poll_read(&mut context, &mut buffer).is_ready());
        assert_eq!(buffer.filled(), &sent[..SIP_BYTES]);
        assert!(pin!(&mut sips).poll_read(&mut context, &mut buffer).is_pending(), "it does something else");
        let mut rest = Vec::new();
        sips.read_to_end(&mut rest).await.unwrap();
        assert_eq!([&first[..SIP_BYTES], &rest].concat(), sent);
    }
}
