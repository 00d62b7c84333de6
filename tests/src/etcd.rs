//! An etcd of one member, for elections.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::wait;

/// A running etcd. Dropping it kills it.
pub struct Etcd {
    child: Child,
    url: String,
    // Last: the directory goes when nobody writes there any more.
    _dir: TempDir,
}

impl Etcd {
    /// Starts it, and waits until it serves; `None` where this machine has no etcd.
    ///
    /// # Errors
    /// Fails if there is one and it does not come up.
    pub fn start() -> anyhow::Result<Option<Self>> {
        let dir = tempfile::tempdir()?;
        let [url, peers] = [free_url()?, free_url()?];
        let folder = dir.path().to_string_lossy().into_owned();
        let cluster = format!("default={peers}");
        let flags = [
            ("--data-dir", &folder),
            ("--listen-client-urls", &url),
            ("--advertise-client-urls", &url),
            ("--listen-peer-urls", &peers),
            ("--initial-advertise-peer-urls", &peers),
            ("--initial-cluster", &cluster),
        ];
        let mut command = Command::new("etcd");
        command.args(["--unsafe-no-fsync", "--logger", "zap"]).stdout(Stdio::null()).stderr(Stdio::null());
        command.args(flags.iter().flat_map(|(flag, value)| [*flag, value.as_str()]));
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let etcd = Self { child, url, _dir: dir };
        wait::until("etcd serves", || ureq::get(format!("{}/health", etcd.url)).call().ok());
        Ok(Some(etcd))
    }

    /// Where clients reach it.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        // Both fail only where it has ended already.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

/// A URL with a port that was free a moment ago: etcd does not tell which port it took.
fn free_url() -> anyhow::Result<String> {
    Ok(format!("http://{}", TcpListener::bind("127.0.0.1:0")?.local_addr()?))
}
