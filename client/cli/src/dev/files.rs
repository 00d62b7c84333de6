//! The files of a development cluster: configs, logs, sockets, and the file that names the newest cluster.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use bytesize::ByteSize;
use larder_coordinator as coordinator;
use larder_net::quic::CredentialFiles;
use larder_net::quic::ca::{Authority, Validity};
use larder_node::config::{
    ClusterConfig, DiskConfig, HostConfig, HttpConfig, ObjectConfig, SessionConfig, TenantConfig,
};
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

/// The directory of one cluster, locked as long as this value lives. A directory that the cluster has made is removed on drop.
#[derive(Debug)]
pub(super) struct Files {
    dir: PathBuf,
    _removes: Option<TempDir>,
    _lock: File,
}

impl Files {
    /// Uses `dir`, or makes a new directory in `runtime_dir`, which exists.
    pub(super) fn create(dir: Option<&Path>, runtime_dir: &Path) -> Result<Self, DevError> {
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source: io::Error| DevError::File { path, source }
        };
        if let Some(dir) = dir {
            // Before the directory is made; the directory itself may have a longer name.
            socket_in(&std::path::absolute(dir).map_err(failed(dir))?, "node-0")?;
            fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed(dir))?;
            let dir = dir.canonicalize().map_err(failed(dir))?;
            let lock = lock(&dir).map_err(failed(&dir))?.ok_or(DevError::InUse { dir: dir.clone() })?;
            return Ok(Self { dir, _removes: None, _lock: lock });
        }
        // While this lock is held, no other process makes or removes directories here.
        let _own = lock_exclusively(runtime_dir).map_err(failed(runtime_dir))?;
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
        socket_in(&self.dir, name)
    }

    /// Makes an authority for the cluster. Its certificate is in the directory; its key is written nowhere.
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
        write_private(&certificate, &issued.certificate_pem)?;
        write_private(&key, &issued.key_pem)?;
        Ok(CredentialFiles { ca: self.dir.join("ca.pem"), certificate, key })
    }

    /// The file of the token that lets the console change nodes.
    pub(super) fn console_token(&self) -> PathBuf {
        self.dir.join("console.token")
    }

    /// Makes the console's token.
    pub(super) fn create_console_token(&self) -> Result<(), DevError> {
        let mut bytes = [0; 16];
        let path = PathBuf::from("/dev/urandom");
        let read = File::open(&path).and_then(|mut random| random.read_exact(&mut bytes));
        read.map_err(|source| DevError::File { path, source })?;
        write_private(&self.console_token(), &format!("{:032x}", u128::from_le_bytes(bytes)))
    }

    /// Has the coordinator forget the members of a cluster before: their processes are gone, and there may be fewer nodes now.
    pub(super) fn forget_members(&self) -> Result<(), DevError> {
        let path = self.coordinator_state();
        match fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(DevError::File { path, source }),
            _ => Ok(()),
        }
    }

    fn coordinator_state(&self) -> PathBuf {
        self.dir.join("coordinator.redb")
    }

    /// The coordinator's config. A restarted coordinator keeps its addresses.
    pub(super) fn coordinator(
        &self,
        CredentialFiles { ca, certificate, key }: CredentialFiles,
        addresses: Option<&ReadyLine>,
        options: &DevOptions,
    ) -> coordinator::Config {
        let listen = addresses.and_then(|ready| ready.peer).unwrap_or_else(any_port);
        coordinator::Config {
            http: coordinator::HttpConfig {
                listen: addresses.map_or_else(any_port, |ready| ready.http),
                console_token_file: None,
                console_admin_token_file: Some(self.console_token()),
                console_admin_certificate: Some(self.dir.join("admin.pem")),
                console_admin_key: Some(self.dir.join("admin.key")),
                console_tokenizers: options.tokenizers.clone(),
            },
            peer: coordinator::PeerConfig { listen, ca, certificate, key },
            state: coordinator::StateConfig { path: self.coordinator_state() },
            membership: coordinator::membership::Patience { grace_ms: GRACE_MS, ..Default::default() },
            election: coordinator::ElectionConfig::default(),
            audit: None,
            tracing: options.tracing.clone(),
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

/// Writes a file that its owner alone may read, in place of any other.
fn write_private(path: &Path, text: &str) -> Result<(), DevError> {
    // No file here: nothing to remove.
    let _ = fs::remove_file(path);
    let file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| DevError::File { path: path.to_owned(), source })
}

/// The config of a node of the cluster whose coordinator is at `coordinator`. The node keeps its HTTP address when it is
/// started again.
pub(super) fn node_config(
    name: &str,
    options: &DevOptions,
    socket: PathBuf,
    coordinator: SocketAddr,
    credentials: CredentialFiles,
    http: Option<SocketAddr>,
) -> larder_node::Config {
    let size = ArenaSize::of(options);
    let host = HostConfig {
        arena_bytes: ByteSize(size.arena_bytes),
        capacity_chunks: options.chunks_per_node,
        extent_bytes: size.extent_bytes.map(ByteSize),
        policy: options.policy.to_string(),
        age_speed: options.age_speed,
        ..HostConfig::default()
    };
    let (low_watermark, high_watermark) =
        size.watermarks.unwrap_or((host.low_watermark, host.high_watermark));
    let disk = |size: DevDisk| DiskConfig {
        segment_bytes: ByteSize(size.segment_bytes),
        ..DiskConfig::new(socket.with_extension("disk"), ByteSize(size.capacity_bytes))
    };
    let cluster = ClusterConfig::new(coordinator.to_string(), credentials);
    // A window holds at least one block.
    let max_window_bytes = ByteSize(options.block_bytes.unwrap_or(0).max(STAGING_BYTES));
    larder_node::Config {
        name: Some(name.to_owned()),
        http: HttpConfig { listen: Some(http.unwrap_or_else(any_port)) },
        host: HostConfig { low_watermark, high_watermark, ..host },
        session: SessionConfig { max_window_bytes, max_sessions: SESSIONS, ..SessionConfig::default() },
        disk: options.disk.map(disk),
        object: options.object_store.clone().map(ObjectConfig::new),
        tracing: options.tracing.clone(),
        tenants: vec![TenantConfig {
            name: TENANT.to_owned(),
            socket,
            max_bytes: None,
            max_window_bytes: None,
        }],
        cluster: Some(ClusterConfig {
            listen: any_port(),
            share: options.share,
            placement: options.placement,
            staging_bytes: size.staging_bytes.map_or(cluster.staging_bytes, ByteSize),
            send_bytes_per_second: options.send_bytes_per_second.map(ByteSize),
            block_threads: options.block_threads,
            blocks_over_tcp: options.blocks_over_tcp,
            ..cluster
        }),
        ..larder_node::Config::default()
    }
}

/// The file `dev.json` in the runtime directory: it names the newest cluster. When that cluster goes, the file names the cluster
/// before it, if that cluster still runs.
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
    /// The cluster that was the newest before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    before: Option<Box<Self>>,
}

impl Announcement {
    /// Names the cluster whose files are in `dir` as the newest.
    pub(super) fn publish(runtime_dir: &Path, dir: &Path, addresses: &Addresses) -> Result<Self, DevError> {
        let path = runtime_dir.join("dev.json");
        let failed = |source| DevError::File { path: path.clone(), source };
        // Another cluster that starts or ends changes the file before or after.
        let _lock = lock_exclusively(runtime_dir).map_err(failed)?;
        // A file that cannot be read names no cluster.
        let before =
            DevFile::read(&path).ok().flatten().and_then(|file| file.running(Some(dir))).map(Box::new);
        let file = DevFile { dir: dir.to_owned(), addresses: addresses.clone(), before };
        file.write(&path).map_err(failed)?;
        Ok(Self { path, dir: dir.to_owned() })
    }

    /// The addresses of the newest cluster that still runs.
    pub(super) fn read(runtime_dir: &Path) -> Result<Addresses, DevError> {
        Self::newest(runtime_dir).map(|file| file.addresses)
    }

    /// The directory of the newest cluster that still runs.
    pub(super) fn dir_of_newest(runtime_dir: &Path) -> Result<PathBuf, DevError> {
        Self::newest(runtime_dir).map(|file| file.dir)
    }

    fn newest(runtime_dir: &Path) -> Result<DevFile, DevError> {
        let path = runtime_dir.join("dev.json");
        let file = DevFile::read(&path).map_err(|source| DevError::File { path, source })?;
        file.and_then(|file| file.running(None)).ok_or(DevError::NotRunning)
    }

    /// Names the cluster before this one again, unless the file names a newer cluster by now.
    pub(super) fn withdraw(&self) {
        let _lock = self.path.parent().map(lock_exclusively);
        let named = DevFile::read(&self.path).ok().flatten().filter(|file| file.dir == self.dir);
        let Some(DevFile { before, .. }) = named else { return };
        let changed = match before.and_then(|before| before.running(Some(&self.dir))) {
            Some(before) => before.write(&self.path),
            None => fs::remove_file(&self.path),
        };
        if let Err(error) = changed {
            tracing::warn!(path = %self.path.display(), %error, "cannot change the file that names the newest cluster");
        }
    }
}

impl DevFile {
    /// `None` if there is no file.
    fn read(path: &Path) -> io::Result<Option<Self>> {
        match fs::read(path) {
            Ok(text) => Ok(Some(serde_json::from_slice(&text)?)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Others read the file at any time: it appears whole or not at all.
    fn write(&self, path: &Path) -> io::Result<()> {
        let unfinished = tempfile::NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))?;
        fs::write(unfinished.path(), serde_json::to_vec(self)?)?;
        unfinished.persist(path)?;
        Ok(())
    }

    /// Those of these clusters that still run, except the cluster in `but`. The lock of a killed cluster is free.
    fn running(self, but: Option<&Path>) -> Option<Self> {
        let before = self.before.and_then(|before| before.running(but)).map(Box::new);
        let runs = Some(&*self.dir) != but && lock(&self.dir).is_ok_and(|lock| lock.is_none());
        if runs { Some(Self { before, ..self }) } else { before.map(|before| *before) }
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        self.withdraw();
    }
}

fn socket_in(dir: &Path, name: &str) -> Result<PathBuf, DevError> {
    let path = dir.join(name).with_extension("sock");
    if path.as_os_str().len() > MAX_SOCKET_PATH_BYTES { Err(DevError::SocketPath { path }) } else { Ok(path) }
}

/// Locks a directory for as long as the file is open; waits while another process has locked it.
fn lock_exclusively(dir: &Path) -> io::Result<File> {
    let file = File::open(dir)?;
    flock(&file, FlockOperation::LockExclusive)?;
    Ok(file)
}

/// Locks a cluster's directory for as long as the file is open; `None` if another process has locked it.
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
            tracing::warn!(dir = %dir.display(), %error, "cannot remove the files of a killed cluster: remove the directory yourself");
        }
    }
}

/// Days that the certificates of a development cluster are valid.
const CERTIFICATE_DAYS: u32 = 30;

/// Time that a restarted coordinator waits for its nodes: they find it within a second.
const GRACE_MS: u64 = 1_000;

/// The prefix of the names of directories that clusters make.
const OWN_PREFIX: &str = "dev-";

fn any_port() -> SocketAddr {
    ([127, 0, 0, 1], 0).into()
}

/// Sessions of a development node: more than a bench of many engines opens at once, while it ends those of its last one.
const SESSIONS: u32 = 256;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

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
        let last = Files::create(None, runtime.path()).unwrap();
        drop(Announcement::publish(runtime.path(), last.dir(), &addresses(3)).unwrap());
        assert_eq!(read().unwrap(), addresses(2), "it still runs, and is the newest again");
        let again = Announcement::publish(runtime.path(), files[1].dir(), &addresses(4)).unwrap();
        let text = fs::read_to_string(runtime.path().join("dev.json")).unwrap();
        assert!(!text.contains(":2\""), "a cluster that was killed in this folder is forgotten: {text}");
        drop(again);
        drop(files);
        assert!(matches!(read(), Err(DevError::NotRunning)), "it was killed");
        drop(newer);
        assert!(matches!(read(), Err(DevError::NotRunning)));
    }

    #[test]
    fn clusters_that_start_at_once_are_all_announced() {
        let runtime = tempfile::tempdir().unwrap();
        let files = [(); 16].map(|()| Files::create(None, runtime.path()).unwrap());
        let publish =
            |files: &Files| Announcement::publish(runtime.path(), files.dir(), &Addresses::default());
        let announced: Vec<_> = std::thread::scope(|scope| {
            let threads = Vec::from_iter(files.iter().map(|files| scope.spawn(|| publish(files).unwrap())));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let mut named = DevFile::read(&announced[0].path).unwrap().map(Box::new);
        let each = std::iter::from_fn(|| named.take().map(|file| named = file.before));
        assert_eq!(each.count(), files.len());
    }

    #[test]
    fn a_private_file_replaces_one_that_others_could_read() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("key"), dir.path().join("other"));
        fs::write(&other, "public").unwrap();
        std::os::unix::fs::symlink(&other, &path).unwrap();
        write_private(&path, "secret").unwrap();
        assert_eq!(fs::read_to_string(&other).unwrap(), "public");
        assert_eq!(fs::symlink_metadata(&path).unwrap().mode() & 0o777, 0o600);
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
    fn a_directory_too_deep_for_sockets_is_refused_and_not_made() {
        let outer = tempfile::tempdir().unwrap();
        let dir = outer.path().join("d".repeat(120));
        let error = Files::create(Some(&dir), outer.path()).unwrap_err().to_string();
        assert!(error.contains("choose a shorter --dir"), "{error}");
        assert!(!dir.exists());
    }

    #[test]
    fn a_node_gets_a_socket_for_the_one_tenant_and_a_free_port() {
        let options = DevOptions { chunks_per_node: Some(3_000), ..DevOptions::new().unwrap() };
        let path = |name: &str| PathBuf::from(name);
        let credentials =
            CredentialFiles { ca: path("ca.pem"), certificate: path("a.pem"), key: path("a.key") };
        let coordinator = ([127, 0, 0, 1], 7_601).into();
        let config =
            node_config("node-0", &options, path("/run/node-0.sock"), coordinator, credentials, None);
        assert_eq!(config.http.listen.unwrap().to_string(), "127.0.0.1:0");
        assert_eq!((config.host.capacity_chunks, config.host.policy.as_str()), (Some(3_000), "adaptive"));
        let [tenant] = &config.tenants[..] else { panic!("one tenant") };
        assert_eq!((tenant.name.as_str(), &tenant.socket), ("default", &path("/run/node-0.sock")));
        let cluster = config.cluster.clone().unwrap();
        assert_eq!((cluster.coordinator.as_str(), cluster.key), ("127.0.0.1:7601", path("a.key")));
        let file = toml::to_string(&config).unwrap();
        assert_eq!(
            larder_node::Config::parse(&file),
            Ok(config),
            "what is written is what the node reads: {file}"
        );
    }
}
