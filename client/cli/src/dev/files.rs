//! The files of a development cluster: configs, logs, sockets, and the one that names the newest cluster.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use larder_net::quic::CredentialFiles;
use larder_net::quic::ca::{Authority, Validity};
use larder_net::trace::TracingConfig;
use larder_protocol::identity::{Identity, Role};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use super::TENANT;
use super::arena::ArenaSize;
use super::child::ReadyLine;
use super::disk::DevDisk;
use super::error::{DevError, MAX_SOCKET_PATH_BYTES};
use super::options::DevOptions;
use crate::cluster::Addresses;
use crate::replay::STAGING_BYTES;

/// The directory of one cluster, locked as long as this lives. One of its own is removed when dropped.
#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    _removes: Option<TempDir>,
    _lock: File,
}

/// The config file of a node.
#[derive(Debug, Serialize)]
pub(super) struct NodeFile {
    name: String,
    http: Listen,
    host: NodeHost,
    session: NodeSession,
    tenants: Vec<NodeTenant>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<NodeDisk>,
    #[serde(skip_serializing_if = "Option::is_none")]
    object: Option<NodeObject>,
    tracing: TracingConfig,
    cluster: NodeCluster,
}

/// The config file of a coordinator.
#[derive(Debug, Serialize)]
pub(super) struct CoordinatorFile {
    http: Listen,
    peer: CoordinatorPeer,
    state: CoordinatorState,
    membership: CoordinatorMembership,
    tracing: TracingConfig,
}

#[derive(Debug, Serialize)]
struct CoordinatorPeer {
    listen: SocketAddr,
    #[serde(flatten)]
    credentials: CredentialPaths,
}

#[derive(Debug, Serialize)]
struct CoordinatorState {
    path: PathBuf,
}

#[derive(Debug, Serialize)]
struct CoordinatorMembership {
    grace_ms: u64,
}

#[derive(Debug, Serialize)]
struct CredentialPaths {
    ca: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

#[derive(Debug, Serialize)]
struct NodeCluster {
    coordinator: String,
    listen: SocketAddr,
    #[serde(flatten)]
    credentials: CredentialPaths,
    share: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    staging_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    send_bytes_per_second: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Listen {
    listen: SocketAddr,
}

#[derive(Debug, Serialize)]
struct NodeHost {
    arena_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    capacity_chunks: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    extent_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    low_watermark: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    high_watermark: Option<f64>,
    policy: &'static str,
}

#[derive(Debug, Serialize)]
struct NodeObject {
    url: String,
}

#[derive(Debug, Serialize)]
struct NodeDisk {
    folder: PathBuf,
    #[serde(flatten)]
    size: DevDisk,
}

#[derive(Debug, Serialize)]
struct NodeSession {
    max_window_bytes: u64,
}

#[derive(Debug, Serialize)]
struct NodeTenant {
    name: String,
    socket: PathBuf,
}

impl Files {
    /// Uses `dir`, or makes a directory of its own in `runtime_dir`, which exists.
    pub(super) fn create(dir: Option<&Path>, runtime_dir: &Path) -> Result<Self, DevError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source: io::Error| DevError::File { path, source }
        };
        if let Some(dir) = dir {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed(dir))?;
            let dir = dir.canonicalize().map_err(failed(dir))?;
            let lock = lock(&dir).map_err(failed(&dir))?.ok_or(DevError::InUse { dir: dir.clone() })?;
            return Ok(Self { dir, _removes: None, _lock: lock });
        }
        // Nobody else makes or removes directories here meanwhile.
        let own = File::open(runtime_dir).map_err(failed(runtime_dir))?;
        flock(&own, FlockOperation::LockExclusive).map_err(io::Error::from).map_err(failed(runtime_dir))?;
        remove_left_behind(runtime_dir);
        let unique = tempfile::Builder::new().prefix(OWN_PREFIX).tempdir_in(runtime_dir);
        let unique = unique.map_err(failed(runtime_dir))?;
        let dir = unique.path().to_owned();
        let lock = lock(&dir).map_err(failed(&dir))?.ok_or(DevError::InUse { dir: dir.clone() })?;
        Ok(Self { dir, _removes: Some(unique), _lock: lock })
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    pub(super) fn log(&self, name: &str) -> PathBuf {
        self.dir.join(name).with_extension("log")
    }

    /// The path of a node's one session socket.
    pub(super) fn socket(&self, name: &str) -> Result<PathBuf, DevError> {
        let path = self.dir.join(name).with_extension("sock");
        if path.as_os_str().len() > MAX_SOCKET_PATH_BYTES {
            Err(DevError::SocketPath { path })
        } else {
            Ok(path)
        }
    }

    /// Makes an authority for the cluster; its certificate stands in the directory, its key nowhere.
    pub(super) fn create_authority(&self) -> Result<Authority, DevError> {
        let path = self.dir.join("ca.pem");
        let made = Authority::create(Validity::days(CERTIFICATE_DAYS));
        let (authority, files) = made.map_err(|source| DevError::Certificate { source })?;
        fs::write(&path, files.certificate_pem).map_err(|source| DevError::File { path, source })?;
        Ok(authority)
    }

    /// Makes a process's certificate and key.
    pub(super) fn issue(
        &self,
        authority: &Authority,
        role: Role,
        name: &str,
    ) -> Result<CredentialFiles, DevError> {
        let issued = authority.issue(&Identity::new(role, name), Validity::days(CERTIFICATE_DAYS));
        let issued = issued.map_err(|source| DevError::Certificate { source })?;
        let [certificate, key] = ["pem", "key"].map(|kind| self.dir.join(name).with_extension(kind));
        for (path, pem) in [(&certificate, issued.certificate_pem), (&key, issued.key_pem)] {
            let mut file = fs::OpenOptions::new();
            let file = file.write(true).create(true).truncate(true).mode(0o600).open(path);
            file.and_then(|mut file| file.write_all(pem.as_bytes()))
                .map_err(|source| DevError::File { path: path.clone(), source })?;
        }
        Ok(CredentialFiles { ca: self.dir.join("ca.pem"), certificate, key })
    }

    /// The config of the coordinator, which keeps its addresses when it is started again.
    pub(super) fn coordinator(
        &self,
        credentials: CredentialFiles,
        addresses: Option<&ReadyLine>,
        tracing: &TracingConfig,
    ) -> CoordinatorFile {
        let peer = addresses.and_then(|ready| ready.peer).unwrap_or_else(any_port);
        CoordinatorFile {
            http: Listen { listen: addresses.map_or_else(any_port, |ready| ready.http) },
            peer: CoordinatorPeer { listen: peer, credentials: credentials.into() },
            state: CoordinatorState { path: self.dir.join("coordinator.redb") },
            membership: CoordinatorMembership { grace_ms: GRACE_MS },
            tracing: tracing.clone(),
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
    /// The config of a node of the cluster whose coordinator is at `coordinator`. It keeps its HTTP address when it is
    /// started again.
    pub(super) fn new(
        name: &str,
        options: &DevOptions,
        socket: PathBuf,
        coordinator: SocketAddr,
        credentials: CredentialFiles,
        http: Option<SocketAddr>,
    ) -> Self {
        let ArenaSize { arena_bytes, extent_bytes, watermarks, staging_bytes } = ArenaSize::of(options);
        let (low_watermark, high_watermark) = watermarks.unzip();
        Self {
            name: name.to_owned(),
            http: Listen { listen: http.unwrap_or_else(any_port) },
            host: NodeHost {
                arena_bytes,
                capacity_chunks: options.chunks_per_node,
                extent_bytes,
                low_watermark,
                high_watermark,
                policy: options.policy.as_str(),
            },
            // A window holds at least one block.
            session: NodeSession { max_window_bytes: options.block_bytes.unwrap_or(0).max(STAGING_BYTES) },
            disk: options.disk.map(|size| NodeDisk { folder: socket.with_extension("disk"), size }),
            object: options.object_store.clone().map(|url| NodeObject { url }),
            tracing: options.tracing.clone(),
            tenants: vec![NodeTenant { name: TENANT.to_owned(), socket }],
            cluster: NodeCluster {
                coordinator: coordinator.to_string(),
                listen: any_port(),
                credentials: credentials.into(),
                share: options.share,
                staging_bytes,
                send_bytes_per_second: options.send_bytes_per_second,
            },
        }
    }
}

impl From<CredentialFiles> for CredentialPaths {
    fn from(CredentialFiles { ca, certificate, key }: CredentialFiles) -> Self {
        Self { ca, certificate, key }
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

    /// The addresses of the newest cluster, if it still runs.
    pub(super) fn read(runtime_dir: &Path) -> Result<Addresses, DevError> {
        Self::newest(runtime_dir).map(|file| file.addresses)
    }

    /// The directory of the newest cluster, if it still runs.
    pub(super) fn dir_of_newest(runtime_dir: &Path) -> Result<PathBuf, DevError> {
        Self::newest(runtime_dir).map(|file| file.dir)
    }

    fn newest(runtime_dir: &Path) -> Result<DevFile, DevError> {
        let path = runtime_dir.join("dev.json");
        match fs::read(&path) {
            Ok(text) => {
                let file: DevFile = serde_json::from_slice(&text)
                    .map_err(|error| DevError::File { path, source: error.into() })?;
                // Nobody holds the lock of a cluster that was killed.
                if lock(&file.dir).is_ok_and(|lock| lock.is_none()) {
                    Ok(file)
                } else {
                    Err(DevError::NotRunning)
                }
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

/// Locks a cluster's directory for as long as the file is open; `None` if somebody else has.
fn lock(dir: &Path) -> io::Result<Option<File>> {
    let file = File::open(dir)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Removes the directories of clusters that were killed.
fn remove_left_behind(runtime_dir: &Path) {
    let entries = fs::read_dir(runtime_dir).into_iter().flatten().flatten();
    let own = entries.filter(|entry| entry.file_name().as_encoded_bytes().starts_with(OWN_PREFIX.as_bytes()));
    for dir in own.map(|entry| entry.path()) {
        let Ok(Some(_lock)) = lock(&dir) else { continue };
        if let Err(error) = fs::remove_dir_all(&dir) {
            tracing::warn!(dir = %dir.display(), %error, "cannot remove what a killed cluster left behind");
        }
    }
}

/// How long certificates of a development cluster are good.
const CERTIFICATE_DAYS: u32 = 30;

/// How long a coordinator that was started again waits for its nodes: they find it within a second.
const GRACE_MS: u64 = 1_000;

/// How the names of directories begin that clusters make for themselves.
const OWN_PREFIX: &str = "dev-";

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
        let files = [(); 2].map(|()| Files::create(None, runtime.path()).unwrap());
        let older = Announcement::publish(runtime.path(), files[0].dir(), &addresses(1)).unwrap();
        let newer = Announcement::publish(runtime.path(), files[1].dir(), &addresses(2)).unwrap();
        drop(older);
        assert_eq!(read().unwrap(), addresses(2));
        drop(files);
        assert!(matches!(read(), Err(DevError::NotRunning)), "it was killed");
        drop(newer);
        assert!(matches!(read(), Err(DevError::NotRunning)));
    }

    #[test]
    fn a_directory_of_its_own_goes_and_one_that_was_asked_for_stays() {
        let runtime = tempfile::tempdir().unwrap();
        let own = Files::create(None, runtime.path()).unwrap();
        let other = Files::create(None, runtime.path()).unwrap();
        let asked = Files::create(Some(&runtime.path().join("asked")), runtime.path()).unwrap();
        assert_ne!(own.dir(), other.dir());
        let [own, other, asked] = [own, other, asked].map(|files| files.dir().to_owned());
        assert!(!own.exists() && !other.exists() && asked.exists());
    }

    #[test]
    fn what_a_killed_cluster_left_behind_goes_when_the_next_one_starts() {
        let runtime = tempfile::tempdir().unwrap();
        let dead = runtime.path().join("dev-dead");
        fs::create_dir(&dead).unwrap();
        let living = Files::create(None, runtime.path()).unwrap();
        assert!(!dead.exists());
        let newer = Files::create(None, runtime.path()).unwrap();
        assert!(living.dir().exists() && newer.dir().exists());
    }

    #[test]
    fn two_clusters_do_not_share_a_directory() {
        let runtime = tempfile::tempdir().unwrap();
        let dir = runtime.path().join("asked");
        let _first = Files::create(Some(&dir), runtime.path()).unwrap();
        let error = Files::create(Some(&dir), runtime.path()).unwrap_err();
        assert!(matches!(error, DevError::InUse { .. }), "{error}");
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
        let path = |name: &str| PathBuf::from(name);
        let credentials =
            CredentialFiles { ca: path("ca.pem"), certificate: path("a.pem"), key: path("a.key") };
        let coordinator = ([127, 0, 0, 1], 7_601).into();
        let file =
            NodeFile::new("node-0", &options, path("/run/node-0.sock"), coordinator, credentials, None);
        let file = toml::to_string(&file).unwrap();
        assert!(file.contains("listen = \"127.0.0.1:0\""), "{file}");
        assert!(file.contains("[[tenants]]\nname = \"default\"\nsocket = \"/run/node-0.sock\""), "{file}");
        assert!(file.contains("capacity_chunks = 3000\npolicy = \"adaptive\""), "{file}");
        assert!(
            file.contains("coordinator = \"127.0.0.1:7601\"") && file.contains("key = \"a.key\""),
            "{file}"
        );
    }
}
