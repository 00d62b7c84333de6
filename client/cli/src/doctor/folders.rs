//! The places that a node uses: the tenants' sockets, its logs, the disk tier, the object store.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use larder_node::config::TenantConfig;
use larder_node::session::{NotASocket, check_socket_path};
use rustix::fs::{Access, access};
use rustix::io::Errno;

use super::probes::{Disk, ObjectStore, in_time};
use super::{Finding, Subject, note, ok, problem, warning};
use crate::output::bytes;

pub(super) fn check(subject: &Subject) -> Vec<Finding> {
    let sockets = subject.config.tenants.iter().map(socket);
    let logs = [("audit", &subject.config.audit), ("record", &subject.config.record)];
    let patience = subject.probes.patience;
    let logs = logs.into_iter().filter_map(|(section, config)| {
        let path = config.as_ref()?.path.clone();
        let name = format!("the drive of {}", path.display());
        Some(in_time(patience, move || log(section, &path)).unwrap_or_else(|| silent("log", &name, patience)))
    });
    let wanted = subject.config.disk.as_ref().map_or(0, |disk| disk.capacity_bytes.0);
    let tiers = subject.probes.disk.as_ref().map(|found| disk(found, wanted)).into_iter();
    let no_answers = subject.probes.silent.iter().map(|(check, name)| silent(check, name, patience));
    sockets
        .chain(logs)
        .chain(tiers)
        .chain(subject.probes.object.as_ref().map(object))
        .chain(no_answers)
        .collect()
}

/// A drive or a store that did not answer a trial in time.
fn silent(check: &'static str, name: &str, patience: Duration) -> Finding {
    problem(
        check,
        format!("{name} has not answered for {} s", patience.as_secs()),
        "look into the kernel's log for errors of the drive, or at the path to the server that has the files",
    )
}

/// Checks a tenant's socket: a process that can open it is its tenant; a process that can write its folder can replace it.
fn socket(tenant: &TenantConfig) -> Finding {
    const CHECK: &str = "socket";
    let TenantConfig { name, socket, .. } = tenant;
    let path = socket.display();
    if let Err(NotASocket { what, .. }) = check_socket_path(socket) {
        let found = format!("{path} of tenant {name} is {what}, not a socket: the node will not start");
        return problem(CHECK, found, "name another path, or move the file away");
    }
    // The node makes missing folders.
    let whole = std::path::absolute(socket).unwrap_or_else(|_| socket.clone());
    let there = whole.ancestors().skip(1).find(|folder| folder.exists()).unwrap_or(Path::new("/"));
    let shown = there.display();
    match std::fs::metadata(there) {
        Ok(metadata) if !metadata.is_dir() => {
            problem(CHECK, format!("{shown} is no folder, so {path} cannot be made"), "name another path")
        }
        Ok(metadata) if metadata.mode() & OTHERS_WRITE != 0 && metadata.mode() & STICKY == 0 => problem(
            CHECK,
            format!("anybody can write {shown}, and replace the socket of tenant {name}"),
            format!("`chmod o-w {shown}`"),
        ),
        Ok(_) if access(there, Access::WRITE_OK | Access::EXEC_OK).is_err() => problem(
            CHECK,
            format!("this user may not write {shown}, the folder of {path} of tenant {name}"),
            format!(
                "give the folder to the node's user, or run this as the node's user: `chown USER {shown}`"
            ),
        ),
        Ok(_) => ok(CHECK, format!("{path} of tenant {name} can be made")),
        Err(error) => {
            problem(CHECK, format!("{shown} cannot be read: {error}"), "run this as the node's user")
        }
    }
}

/// Checks a log: its file, and the folder, where older files stay beside it.
fn log(section: &str, path: &Path) -> Finding {
    const CHECK: &str = "log";
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = || access(path, Access::WRITE_OK);
    let beside = || access(folder, Access::WRITE_OK | Access::EXEC_OK);
    let written = match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => Err(Errno::ISDIR),
        Ok(found) if found.is_file() => file().map(|()| beside().err()),
        // A pipe or a device.
        Ok(_) => file().map(|()| None),
        Err(_) => beside().map(|()| None),
    };
    let path = path.display();
    match written {
        Ok(None) => ok(CHECK, format!("{path} of [{section}] can be written")),
        Ok(Some(error)) => warning(
            CHECK,
            format!("this user can write {path}, the path of [{section}], but no files beside it: {error}"),
            "give its folder to the node's user: once the file is full, further lines are lost",
        ),
        Err(error) => problem(
            CHECK,
            format!("this user cannot write {path}, the path of [{section}]: {error}"),
            "name a file in a folder that the node's user may write: the node does not start without it",
        ),
    }
}

/// Checks the drive of a disk tier that is to have `wanted` bytes.
fn disk(disk: &Disk, wanted: u64) -> Finding {
    const CHECK: &str = "disk";
    let folder = disk.folder.display();
    let free = bytes(disk.free_bytes);
    let room = disk.free_bytes.saturating_add(disk.tier_bytes);
    match &disk.is_direct {
        Err(error) => problem(
            CHECK,
            format!("no file can be written in {folder}: {error}"),
            "name a folder that the node's user may write",
        ),
        Ok(_) if VOLATILE.contains(&disk.file_system.as_str()) => problem(
            CHECK,
            format!(
                "{folder} is on {}: files there take memory, and are lost at a restart",
                disk.file_system
            ),
            "name a folder on a local drive",
        ),
        Ok(_) if REMOTE.contains(&disk.file_system.as_str()) => warning(
            CHECK,
            format!("{folder} is on {}, over the network", disk.file_system),
            "name a folder on a local drive: a peer's memory is nearer than a remote disk",
        ),
        Ok(false) => warning(
            CHECK,
            format!(
                "{folder} is on {}, which has no O_DIRECT: every byte is copied through the page cache",
                disk.file_system
            ),
            "use ext4 or XFS on a local drive",
        ),
        Ok(true) if room < wanted => warning(
            CHECK,
            format!("the tier in {folder} takes {}, and has {} there", bytes(wanted), bytes(room)),
            "lower [disk] capacity_bytes, or free the space: the node serves without the tier until then",
        ),
        Ok(true) if room < LITTLE_SPACE => {
            note(CHECK, format!("{folder} has {free} free"), "a disk tier pays from some hundred GiB on")
        }
        Ok(true) => ok(CHECK, format!("{folder} is on {}, with O_DIRECT, {free} free", disk.file_system)),
    }
}

fn object(object: &ObjectStore) -> Finding {
    const CHECK: &str = "object store";
    match &object.is_usable {
        Ok(()) if object.writes => ok(CHECK, format!("{} allows writing, reading and deleting", object.url)),
        Ok(()) => ok(CHECK, format!("{} allows reading", object.url)),
        Err(error) => {
            warning(CHECK, error, "until then the node serves without the store, or without that right")
        }
    }
}

const OTHERS_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;
const VOLATILE: [&str; 2] = ["tmpfs", "ramfs"];
const REMOTE: [&str; 3] = ["nfs", "cifs", "fuse"];
const LITTLE_SPACE: u64 = 16 << 30;
