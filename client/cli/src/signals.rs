//! The wish to stop: Ctrl-C, SIGTERM, or the end of the terminal.

use std::future::Future;
use std::io;

use rustix::process::Signal;
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

/// From now on, a file that would grow beyond the process's limit of file sizes is an error of its writer (EFBIG); without this the
/// system ends the process. Needs a tokio runtime.
pub(crate) fn outlive_limit_of_file_sizes() -> io::Result<()> {
    // The handler stays when nobody listens any more.
    signal(SignalKind::from_raw(Signal::XFSZ.as_raw())).map(drop)
}

/// As [`stop`], and ready at SIGHUP too, which tells that the terminal is closed. If this process was told to outlive its terminal
/// (`nohup`), SIGHUP means nothing.
pub(crate) fn stop_or_hangup() -> io::Result<impl Future<Output = ()>> {
    let hangup = if ignores_hangups()? { None } else { Some(signal(SignalKind::hangup())?) };
    let stop = stop()?;
    Ok(async move {
        match hangup {
            Some(mut hangup) => tokio::select! {
                () = stop => {}
                _ = hangup.recv() => {}
            },
            None => stop.await,
        }
    })
}

/// Whether this process was started with SIGHUP ignored.
fn ignores_hangups() -> io::Result<bool> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|signals| u64::from_str_radix(signals.trim(), 16).ok());
    // Bit 0 is signal 1, SIGHUP.
    Ok(ignored.is_some_and(|signals| signals & 1 == 1))
}
