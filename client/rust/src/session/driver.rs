//! The task that receives a session's answers.

use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Notify;

use crate::link::Link;
use larder_ipc::socket::FrameReader;

/// Closes the session when its task ends, in whatever way.
struct CloseAtEnd(Weak<Link>);

/// Starts the task of a session on the current runtime. It ends with the socket, which the last handle of the session
/// shuts down.
pub(super) fn spawn(link: &Arc<Link>, socket: UnixStream, reader: FrameReader) {
    let unsent = Arc::clone(link.unsent());
    let link = Arc::downgrade(link);
    tokio::spawn(async move {
        let link = CloseAtEnd(link);
        tokio::select! {
            () = receive(&socket, &link.0, reader) => {}
            () = send_rest(&socket, &link.0, &unsent) => {}
        }
    });
}

async fn receive(socket: &UnixStream, link: &Weak<Link>, mut reader: FrameReader) {
    loop {
        if !link.upgrade().is_some_and(|link| link.deliver_all(&mut reader)) {
            return;
        }
        match socket.async_io(Interest::READABLE, || reader.receive(socket.as_fd())).await {
            Ok(1..) => {}
            Ok(0) => return,
            Err(error) => {
                tracing::debug!(%error, "a session's socket failed");
                return;
            }
        }
    }
}

/// Sends what callers could not send without blocking.
async fn send_rest(socket: &UnixStream, link: &Weak<Link>, unsent: &Notify) {
    loop {
        unsent.notified().await;
        let flush = || link.upgrade().map_or(Ok(()), |link| link.flush_rest());
        if socket.async_io(Interest::WRITABLE, flush).await.is_err() {
            return;
        }
    }
}

impl Drop for CloseAtEnd {
    fn drop(&mut self) {
        if let Some(link) = self.0.upgrade() {
            link.close();
        }
    }
}
