//! The files of a development cluster: configs, logs, sockets, and the one that names the newest cluster.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use larder_coordinator::{Config as CoordinatorConfig, HttpConfig, NodeConfig};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::TENANT;
use super::error::{DevError, MAX_SOCKET_PATH_BYTES};
use super::options::{DevOptions, Policy};
use crate::cluster::Addresses;

/// The directory of one cluster.
#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    /// Removes the directory when dropped; `None` where it is to stay.
    removes: Option<TempDir>,
}

/// The config file of a node.
#[derive(Debug, Serialize)]
pub(super) struct NodeFile {
    name: String,
    http: NodeHttp,
    host: NodeHost,
    tenants: Vec<NodeTenant>,
}

#[derive(Debug, Serialize)]
struct NodeHttp {
    listen: SocketAddr,
}

#[derive(Debug, Serialize)]
struct NodeHost {
    arena_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity_chunks: Option<u64>,
    policy: Policy,
}

#[derive(Debug, Serialize)]
struct NodeTenant {
    name: String,
    socket: PathBuf,
}

impl Files {
    /// Uses `dir`, or makes a directory of its own in `runtime_dir`, which exists.
    pub(super) fn create(dir: Option<&Path>, runtime_dir: &Path) -> Result<Self, DevError> {
        let Some(dir) = dir else {
            let unique = tempfile::Builder::new().prefix("dev-").tempdir_in(runtime_dir);
            let unique = unique.map_err(|source| DevError::File { path: runtime_dir.to_owned(), source })?;
            return Ok(Self { dir: unique.path().to_owned(), removes: Some(unique) });
        };
        let failed = |source| DevError::File { path: dir.to_owned(), source };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
        Ok(Self { dir: dir.canonicalize().map_err(failed)?, removes: None })
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Leaves the directory where it is: something went wrong, and the logs say what.
    pub(super) fn keep(&mut self) {
        self.removes.take().map(TempDir::keep);
    }

    pub(super) fn log(&self, name: &str) -> PathBuf {
        self.dir.join(name).with_extension("log")
    }

    /// Where a node's one session socket is.
    pub(super) fn socket(&self, name: &str) -> Result<PathBuf, DevError> {
        let path = self.dir.join(name).with_extension("sock");
        if path.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
            Err(DevError::SocketPath { path })
        } else {
            Ok(path)
        }
    }

    pub(super) fn write_config(&self, name: &str, config: &impl Serialize) -> Result<PathBuf, DevError> {
        let path = self.dir.join(name).with_extension("toml");
        let failed = |source| DevError::File { path: path.clone(), source };
        let text = toml::to_string(config).map_err(io::Error::other).map_err(failed)?;
        fs::write(&path, text).map_err(failed)?;
        Ok(path)
    }
}

impl NodeFile {
    pub(super) fn new(name: &str, options: &DevOptions, socket: PathBuf) -> Self {
        Self {
            name: name.to_owned(),
            http: NodeHttp { listen: any_port() },
            host: NodeHost {
                arena_bytes: options.resolved_arena_bytes(),
                capacity_chunks: options.chunks_per_node,
                policy: options.policy,
            },
            tenants: vec![NodeTenant { name: TENANT.to_owned(), socket }],
        }
    }
}

/// The config of a coordinator that knows these nodes.
pub(super) fn coordinator_config(addresses: &Addresses) -> CoordinatorConfig {
    let node = |node: &crate::cluster::NodeAddress| NodeConfig { name: node.name.clone(), http: node.http };
    CoordinatorConfig {
        http: HttpConfig { listen: any_port() },
        nodes: addresses.nodes.iter().map(node).collect(),
    }
}

/// The file `dev.json` in the runtime directory: it names the newest cluster, and goes when that cluster does.
#[derive(Debug)]
pub struct Announcement {
    path: PathBuf,
    dir: PathBuf,
}

#[derive(Debug, Serialize, Deserialize)]
struct DevFile {
    dir: PathBuf,
    #[serde(flatten)]
    addresses: Addresses,
}

impl Announcement {
    /// Names the cluster whose files are in `dir` as the newest.
    pub(super) fn publish(runtime_dir: &Path, dir: &Path, addresses: &Addresses) -> Result<Self, DevError> {
        let path = runtime_dir.join("dev.json");
        let failed = |source| DevError::File { path: path.clone(), source };
        let file = DevFile { dir: dir.to_owned(), addresses: addresses.clone() };
        let text = serde_json::to_vec(&file).map_err(io::Error::from).map_err(failed)?;
        // Others read it at any time: it appears whole or not at all.
        let unfinished = tempfile::NamedTempFile::new_in(runtime_dir).map_err(failed)?;
        fs::write(unfinished.path(), text).map_err(failed)?;
        unfinished.persist(&path).map_err(|error| failed(error.error))?;
        Ok(Self { path, dir: dir.to_owned() })
    }

    /// The newest cluster.
    pub(super) fn read(runtime_dir: &Path) -> Result<Addresses, DevError> {
        let path = runtime_dir.join("dev.json");
        match fs::read(&path) {
            Ok(text) => {
                let file: DevFile = serde_json::from_slice(&text)
                    .map_err(|error| DevError::File { path, source: error.into() })?;
                Ok(file.addresses)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(DevError::NotRunning),
            Err(source) => Err(DevError::File { path, source }),
        }
    }

    /// Takes the file away, unless it names a newer cluster by now.
    pub(super) fn withdraw(&self) {
        let ours = fs::read(&self.path)
            .ok()
            .and_then(|text| serde_json::from_slice::<DevFile>(&text).ok())
            .is_some_and(|file| file.dir == self.dir);
        if ours && let Err(error) = fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the file that names this cluster");
        }
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        self.withdraw();
    }
}

fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_cluster_is_announced_and_an_older_one_does_not_take_that_away() {
        let runtime = tempfile::tempdir().unwrap();
        let read = || Announcement::read(runtime.path());
        assert!(matches!(read(), Err(DevError::NotRunning)));
        let addresses = |port| Addresses { coordinator: Some(([127, 0, 0, 1], port).into()), nodes: vec![] };
        let older = Announcement::publish(runtime.path(), Path::new("/a"), &addresses(1)).unwrap();
        let newer = Announcement::publish(runtime.path(), Path::new("/b"), &addresses(2)).unwrap();
        drop(older);
        assert_eq!(read().unwrap(), addresses(2));
        drop(newer);
        assert!(matches!(read(), Err(DevError::NotRunning)));
    }

    #[test]
    fn a_directory_of_its_own_goes_unless_it_is_to_be_kept() {
        let runtime = tempfile::tempdir().unwrap();
        let gone = Files::create(None, runtime.path()).unwrap();
        let mut kept = Files::create(None, runtime.path()).unwrap();
        kept.keep();
        let [gone, kept] = [gone, kept].map(|files| files.dir().to_owned());
        assert_ne!(gone, kept);
        assert!(!gone.exists() && kept.exists());
    }

    #[test]
    fn a_directory_too_deep_for_sockets_is_refused() {
        let outer = tempfile::tempdir().unwrap();
        let files = Files::create(Some(&outer.path().join("d".repeat(120))), outer.path()).unwrap();
        let error = files.socket("node-0").unwrap_err().to_string();
        assert!(error.contains("choose a shorter --dir"), "{error}");
    }

    #[test]
    fn a_node_gets_a_socket_for_the_one_tenant_and_a_free_port() {
        let options = DevOptions { chunks_per_node: Some(3_000), ..DevOptions::new().unwrap() };
        let file = toml::to_string(&NodeFile::new("node-0", &options, "/run/node-0.sock".into())).unwrap();
        assert!(file.contains("listen = \"127.0.0.1:0\""), "{file}");
        assert!(file.contains("[[tenants]]\nname = \"default\"\nsocket = \"/run/node-0.sock\""), "{file}");
        assert!(file.contains("capacity_chunks = 3000\npolicy = \"adaptive\""), "{file}");
    }
}
