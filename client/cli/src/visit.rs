//! Short sessions of the command line itself, with each device of a node.

use std::path::{Path, PathBuf};

use anyhow::bail;
use larder_client::{Namespace, Session, SessionError, SessionOptions};
use larder_protocol::NamespaceSpec;
use larder_protocol::session::RefusalCode;

use crate::dev::{self, DevError};

/// Sessions with every device behind a socket.
///
/// # Errors
/// No node answers there, or the node takes no session.
pub(crate) fn every_device(socket: &Path) -> anyhow::Result<Vec<Session>> {
    let mut sessions = Vec::new();
    for device in 0.. {
        match device_of(socket, device) {
            Err(SessionError::Refused(refusal)) if device > 0 && refusal.code == RefusalCode::Unknown => {
                break;
            }
            session => sessions.push(session?),
        }
    }
    Ok(sessions)
}

/// A session with one device, whose lookups are not counted as an engine's.
///
/// # Errors
/// No node answers there, or the node takes no session.
pub(crate) fn device_of(socket: &Path, device: u16) -> Result<Session, SessionError> {
    let options = SessionOptions {
        client: concat!("larder ", env!("CARGO_PKG_VERSION")).into(),
        device: Some(device),
        window_bytes: 0,
        ..SessionOptions::default()
    };
    let session = Session::connect(socket, options).wait()?;
    session.observe();
    Ok(session)
}

/// Makes a namespace known to a device, as an engine with all of its slices would.
///
/// # Errors
/// The node refuses the namespace.
pub(crate) fn register(session: &Session, spec: &NamespaceSpec) -> Result<Namespace, SessionError> {
    let slices: Vec<u16> = (0..spec.slices).collect();
    let block_bytes: Vec<u64> = spec.pools.iter().map(|pool| pool.block_bytes()).collect();
    session.register(spec, &slices, &block_bytes).wait()
}

/// The given socket, or the sockets of the newest development cluster, or the usual path of a node's socket.
///
/// # Errors
/// No socket is given, no development cluster runs, and no socket has the usual path.
pub(crate) fn sockets(given: Option<&PathBuf>) -> anyhow::Result<Vec<PathBuf>> {
    if let Some(socket) = given {
        return Ok(vec![socket.clone()]);
    }
    match dev::newest() {
        Ok(newest) => Ok(newest.nodes.into_iter().flat_map(|node| node.sockets.into_values()).collect()),
        Err(DevError::NotRunning | DevError::RuntimeDir(_)) if Path::new(USUAL).exists() => {
            Ok(vec![USUAL.into()])
        }
        Err(DevError::NotRunning) => {
            bail!(
                "no development cluster is running, and no node has {USUAL}: name a node's socket by --socket"
            )
        }
        Err(error) => Err(error.into()),
    }
}

/// The socket of the tenant `default`, as deploy/ and the book have it.
const USUAL: &str = "/run/larder/default.sock";
