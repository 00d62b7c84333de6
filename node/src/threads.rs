//! Named threads on chosen CPUs.
//!
//! A thread that cannot be pinned runs where the kernel puts it. It may be slower, but never wrong, so this is only a warning.

use std::ffi::CString;
use std::io::{self, ErrorKind};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use actix_rt::Arbiter;
use larder_net::blocking::no_thread;
use rustix::thread::{sched_getaffinity, sched_setaffinity, set_name};

use crate::host::CpuSet;

/// Waits for a thread when dropped. The field that gives the thread work must be dropped first, so it is before this field in
/// a struct.
#[derive(Debug)]
pub(crate) struct Joined(Option<JoinHandle<()>>);

impl From<JoinHandle<()>> for Joined {
    fn from(thread: JoinHandle<()>) -> Self {
        Self(Some(thread))
    }
}

impl Joined {
    /// Waits for the thread, but lets it go on alone once `gives_up`, which is asked again and again.
    pub(crate) fn join_unless(mut self, mut gives_up: impl FnMut() -> bool) {
        while self.0.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if gives_up() {
                self.0 = None;
            } else {
                std::thread::sleep(LOOK_AT_END);
            }
        }
    }
}

impl Drop for Joined {
    fn drop(&mut self) {
        let Some(thread) = self.0.take() else { return };
        let name = thread.thread().name().map(str::to_owned);
        if thread.join().is_err() {
            tracing::error!(name, "a thread panicked outside of any order; please report this line");
        }
    }
}

/// Starts a thread called `name` (the kernel keeps 15 bytes of the name) on `cpus`.
///
/// # Errors
/// Fails if the system gives no thread.
pub fn spawn<T: Send + 'static>(
    name: &str,
    cpus: &CpuSet,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let cpus = cpus.clone();
    let started = Builder::new().name(name.to_owned()).spawn(move || {
        pin_or_warn(&cpus);
        run()
    });
    started.map_err(no_thread)
}

/// Starts an arbiter with a current-thread runtime, on a thread called `name` on `cpus`.
///
/// # Errors
/// Fails if the system gives no thread, or nothing to wait on.
pub(crate) fn arbiter(name: String, cpus: &CpuSet) -> io::Result<Arbiter> {
    let cpus = cpus.clone();
    let started = Arbiter::try_with_tokio_rt(move || {
        self::name(&name);
        pin_or_warn(&cpus);
        // The runtime is made here, on the thread itself.
        tokio::runtime::Builder::new_current_thread().enable_all().build()
    });
    started.map_err(|error| if error.kind() == ErrorKind::WouldBlock { no_thread(error) } else { error })
}

/// Names the calling thread, for people who look at the process; the kernel keeps 15 bytes.
pub fn name(name: &str) {
    let named = CString::new(name).map_err(io::Error::other);
    if let Err(error) = named.and_then(|name| Ok(set_name(&name)?)) {
        tracing::debug!(%error, name, "a thread keeps its old name");
    }
}

/// Pins the calling thread to `cpus`, then asks the kernel, and warns if the thread may run on other CPUs.
pub fn pin_or_warn(cpus: &CpuSet) {
    match pin(cpus).and_then(|()| pinned_to()) {
        Ok(real) if real == *cpus => {}
        Ok(real) => tracing::warn!(asked = %cpus, %real, "a thread runs on other CPUs than it should"),
        Err(error) => tracing::warn!(asked = %cpus, %error, "a thread cannot be pinned to its CPUs"),
    }
}

/// Pins the calling thread to `cpus`.
///
/// # Errors
/// Fails if this process may use none of these CPUs.
pub fn pin(cpus: &CpuSet) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus.iter().map(|cpu| cpu as usize).filter(|&cpu| cpu < rustix::thread::CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    Ok(sched_setaffinity(None, &set)?)
}

/// The CPUs on which the kernel lets the calling thread run.
///
/// # Errors
/// Fails if the kernel does not say: it has more CPUs than its interface's usual size.
pub fn pinned_to() -> io::Result<CpuSet> {
    let set = sched_getaffinity(None)?;
    Ok((0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).map(|cpu| cpu as u32).collect())
}

/// How often a thread that waits for another one's end looks at it.
const LOOK_AT_END: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_runs_where_it_was_asked_to() {
        let allowed = pinned_to().unwrap();
        let last: CpuSet = allowed.iter().last().into_iter().collect();
        let inside = last.clone();
        let (name, real) = spawn("larder-test", &last, move || {
            (std::thread::current().name().map(str::to_owned), pinned_to().unwrap())
        })
        .unwrap()
        .join()
        .unwrap();
        assert_eq!((name.as_deref(), real), (Some("larder-test"), inside));
        assert_eq!(pinned_to().unwrap(), allowed, "the others stay where they were");
    }

    #[test]
    fn an_arbiter_that_gets_no_thread_is_an_error_that_names_the_limits() {
        // No address space has room for such a stack.
        let stack = (1_u64 << 60).to_string();
        if std::env::var("RUST_MIN_STACK").is_ok_and(|set| set == stack) {
            actix_rt::System::new().block_on(async {
                let error = arbiter("larder-test".to_owned(), &CpuSet::default()).unwrap_err();
                assert!(error.to_string().contains("pids.max, TasksMax="), "{error}");
            });
            return;
        }
        let name = std::thread::current().name().unwrap().to_owned();
        let mut again = std::process::Command::new(std::env::current_exe().unwrap());
        let ran = again.args(["--exact", &name]).env("RUST_MIN_STACK", stack).output().unwrap();
        let said = String::from_utf8(ran.stdout).unwrap();
        assert!(ran.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn a_thread_that_cannot_be_pinned_runs_anyway() {
        let nowhere: CpuSet = [1_000, 70_000].into_iter().collect();
        assert!(pin(&nowhere).is_err());
        assert_eq!(spawn("larder-test", &nowhere, || 7).unwrap().join().unwrap(), 7);
    }
}
