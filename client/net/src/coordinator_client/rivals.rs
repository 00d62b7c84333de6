//! Finds coordinators that lead beside the one that is followed.

use std::net::SocketAddr;
use std::time::Duration;

use larder_protocol::identity::Role;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage, Standing};
use larder_protocol::version::Version;
use tokio::sync::mpsc;
use tokio::time::{interval, timeout};

use super::Resolver;
use crate::quic::{Endpoint, read_message, write_message};

/// Asks the coordinator at an address for its standing; `None` if no answer comes in time. A coordinator that asks passes its own
/// standing as `own`.
///
/// # Cancel safety
/// Dropped, it gives up the question.
pub async fn who(endpoint: &Endpoint, address: SocketAddr, own: Option<Standing>) -> Option<Standing> {
    let ask = async {
        let connection = endpoint.connect(address, Role::Coordinator, None).await.ok()?;
        if connection.version() < Version::SECOND {
            return None;
        }
        let (mut send, mut receive) = connection.quic().open_bi().await.ok()?;
        write_message(&mut send, &FollowerMessage::Who(own)).await.ok()?;
        match read_message(&mut receive).await {
            Ok(Some(CoordinatorMessage::Standing(standing))) => Some(standing),
            _ => None,
        }
    };
    timeout(DEADLINE, ask).await.ok().flatten()
}

/// Asks all coordinators for their standings from time to time, until `found` is closed. Sends to `found` the address of each
/// coordinator that leads and is not the life `followed`.
pub(super) async fn look(
    endpoint: Endpoint,
    coordinators: Vec<String>,
    followed: u64,
    found: mpsc::Sender<SocketAddr>,
) {
    let (mut rounds, mut resolver) = (interval(EVERY), Resolver::default());
    loop {
        rounds.tick().await;
        let addresses = resolver.resolve(&coordinators).await;
        if addresses.len() < 2 {
            continue;
        }
        for address in addresses {
            let standing = who(&endpoint, address, None).await;
            if standing.is_some_and(|standing| standing.leads && standing.life != followed)
                && found.send(address).await.is_err()
            {
                return;
            }
        }
    }
}

/// How often a node asks. Each question costs a handshake.
const EVERY: Duration = Duration::from_secs(60);

/// How long an answer may take.
const DEADLINE: Duration = Duration::from_secs(2);
