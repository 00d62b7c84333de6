//! The wish to stop: Ctrl-C or SIGTERM.

use std::future::Future;
use std::io;

use tokio::signal::unix::{SignalKind, signal};

/// Ready at the first SIGINT or SIGTERM after this call. Needs a tokio runtime.
pub(crate) fn stop() -> io::Result<impl Future<Output = ()>> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}
