//! An admin's requests to nodes. They go over QUIC with a certificate, since HTTP has no authentication and changes nothing.

use std::cell::OnceCell;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use larder_coordinator::{NodeStatus, Status};
use larder_net::quic::{
    Connection, CredentialFiles, Credentials, Endpoint, TransportSettings, read_message, write_message,
};
use larder_protocol::identity::Role;
use larder_protocol::membership::{CoordinatorMessage, FollowerMessage};
use larder_protocol::peer::{PeerRequest, PeerResponse};
use tokio::time::timeout;

use crate::address::HostPort;
use crate::failure::Usage;
use crate::http;

/// The arguments that name an admin's certificate.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct AdminArgs {
    /// Certificates of the nodes' authorities
    #[arg(long, value_name = "FILE", requires_all = ["certificate", "key"])]
    ca: Option<PathBuf>,

    /// An admin's certificate
    #[arg(long, value_name = "FILE", requires = "ca")]
    certificate: Option<PathBuf>,

    /// The certificate's key
    #[arg(long, value_name = "FILE", requires = "ca")]
    key: Option<PathBuf>,
}

/// The sockets from which an admin's connections go out: one for each kind of address, however many nodes are asked.
pub(crate) struct AdminSockets<'a> {
    credentials: &'a Credentials,
    v4: OnceCell<Endpoint>,
    v6: OnceCell<Endpoint>,
}

/// A connection to one node.
pub(crate) struct AdminLink {
    endpoint: Endpoint,
    connection: Connection,
    /// The node's name and address, for messages.
    peer: String,
}

impl AdminArgs {
    /// The admin's credentials: the given files, or else those of the chosen cluster.
    ///
    /// # Errors
    /// No files are given or known, they cannot be used, or they are not an admin's.
    pub(crate) fn credentials(&self, of_cluster: Option<CredentialFiles>) -> anyhow::Result<Credentials> {
        let given = self.ca.clone().zip(self.certificate.clone()).zip(self.key.clone());
        let given = given.map(|((ca, certificate), key)| CredentialFiles { ca, certificate, key });
        let files = given.or(of_cluster).context(Usage(
            "a change needs an admin's --ca, --certificate and --key: `larder ca issue admin NAME`".into(),
        ))?;
        credentials(&files)
    }
}

/// An admin's credentials.
///
/// # Errors
/// The files cannot be used, or are not an admin's.
pub(crate) fn credentials(files: &CredentialFiles) -> anyhow::Result<Credentials> {
    let credentials = Credentials::load(files).context(Usage("cannot use the certificate".into()))?;
    let role = credentials.identity().role;
    if role != Role::Admin {
        return Err(Usage(format!(
            "the certificate belongs to a {role}; only an admin may do this: `larder ca issue admin NAME`"
        ))
        .into());
    }
    Ok(credentials)
}

impl<'a> AdminSockets<'a> {
    pub(crate) fn new(credentials: &'a Credentials) -> Self {
        Self { credentials, v4: OnceCell::new(), v6: OnceCell::new() }
    }

    /// Connects to a node.
    ///
    /// # Errors
    /// The node does not answer, or another node does.
    pub(crate) async fn connect(&self, member: &NodeStatus) -> anyhow::Result<AdminLink> {
        let endpoint = self.endpoint(member.peer)?;
        let peer = member.peer.to_string();
        let connecting = endpoint.connect(member.peer, Role::Node, Some(&member.name));
        let connection = timeout(PATIENCE, connecting).await.map_err(|_| late(&peer))??;
        Ok(AdminLink { endpoint, connection, peer })
    }

    /// Closes all connections.
    pub(crate) async fn close(self) {
        for endpoint in [self.v4, self.v6].into_iter().filter_map(OnceCell::into_inner) {
            endpoint.close().await;
        }
    }

    fn endpoint(&self, to: SocketAddr) -> anyhow::Result<Endpoint> {
        let (bound, any) = if to.is_ipv4() { (&self.v4, "0.0.0.0:0") } else { (&self.v6, "[::]:0") };
        if let Some(endpoint) = bound.get() {
            return Ok(endpoint.clone());
        }
        let endpoint = Endpoint::bind(any.parse()?, self.credentials, &TransportSettings::brief())?;
        Ok(bound.get_or_init(|| endpoint).clone())
    }
}

impl AdminLink {
    /// Connects to a node, from a socket of its own.
    ///
    /// # Errors
    /// The node does not answer, or another node does.
    pub(crate) async fn connect(credentials: &Credentials, member: &NodeStatus) -> anyhow::Result<Self> {
        AdminSockets::new(credentials).connect(member).await
    }

    /// Sends a request to the node, and waits for the answer.
    ///
    /// # Errors
    /// The node does not answer, refuses, or has too much to do.
    pub(crate) async fn ask(&self, request: &PeerRequest) -> anyhow::Result<PeerResponse> {
        let version = self.connection.version();
        if version < request.since() {
            bail!("{} speaks {version}, too old for this: upgrade that node first", self.peer);
        }
        let answer = async {
            let (mut send, mut receive) = self.connection.quic().open_bi().await?;
            write_message(&mut send, request).await?;
            send.finish()?;
            anyhow::Ok(read_message(&mut receive).await?)
        };
        match timeout(ANSWER_PATIENCE, answer).await.with_context(|| self.late())?? {
            Some(PeerResponse::Refused(why)) => bail!("the node refuses: {why}"),
            Some(PeerResponse::Busy(_)) => bail!("the node has too much to do: try again"),
            Some(answer) => Ok(answer),
            None => bail!("the node sent no answer"),
        }
    }

    fn late(&self) -> String {
        let seconds = ANSWER_PATIENCE.as_secs();
        format!("{} is connected, and did not answer within {seconds} s: see `larder status`", self.peer)
    }

    /// Whether the node has closed the connection, as a node does that ends in order.
    pub(crate) fn was_closed(&self) -> bool {
        matches!(self.connection.quic().close_reason(), Some(quinn::ConnectionError::ApplicationClosed(_)))
    }

    /// Ends the connection, and all others from its socket.
    pub(crate) async fn close(self) {
        self.endpoint.close().await;
    }
}

/// Sends a message to a coordinator, at its address for nodes and admins.
///
/// # Errors
/// The server does not answer, or is no coordinator.
pub(crate) async fn ask_at(
    credentials: &Credentials,
    peer: SocketAddr,
    message: &FollowerMessage,
) -> anyhow::Result<CoordinatorMessage> {
    let any = if peer.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let endpoint = Endpoint::bind(any.parse()?, credentials, &TransportSettings::brief())?;
    let asked = async {
        let connection = endpoint.connect(peer, Role::Coordinator, None).await?;
        let (mut send, mut receive) = connection.quic().open_bi().await?;
        write_message(&mut send, message).await?;
        anyhow::Ok(read_message(&mut receive).await?)
    };
    let answer = timeout(PATIENCE, asked).await.map_err(|_| late(&peer.to_string()))?;
    endpoint.close().await;
    answer?.context("the coordinator sent no answer")
}

/// The address for nodes and admins of the coordinator whose HTTP address this is.
///
/// # Errors
/// The coordinator does not answer, or is too old to say so.
pub(crate) async fn peer_of_coordinator(address: SocketAddr) -> anyhow::Result<SocketAddr> {
    let status = tokio::task::spawn_blocking(move || http::get_json::<Status>(&address, "/status")).await??;
    ensure!(
        status.peer_port > 0,
        "{address} has an older version, which cannot do this: upgrade the coordinator"
    );
    Ok(SocketAddr::new(address.ip(), status.peer_port))
}

/// Asks the coordinators at all addresses of all names: a name may stand for all coordinators of a cluster. Returns the answers
/// with the coordinators' names.
pub(crate) async fn ask_coordinators<T>(
    names: &[HostPort],
    ask: impl AsyncFn(SocketAddr) -> anyhow::Result<T>,
) -> Vec<(String, anyhow::Result<T>)> {
    let mut answers = Vec::new();
    for name in names {
        match tokio::net::lookup_host(name.to_string()).await {
            Ok(found) => answers.extend(ask_addresses(name, found.collect(), &ask).await),
            Err(error) => answers.push((name.to_string(), Err(error.into()))),
        }
    }
    answers
}

async fn ask_addresses<T>(
    name: &HostPort,
    mut addresses: Vec<SocketAddr>,
    ask: &impl AsyncFn(SocketAddr) -> anyhow::Result<T>,
) -> Vec<(String, anyhow::Result<T>)> {
    addresses.sort_unstable();
    addresses.dedup();
    let mut answers = Vec::new();
    for &address in &addresses {
        answers.push((address, ask(address).await));
    }
    // A coordinator may listen at its IPv4 addresses alone, though its name has others.
    let v4_answers = answers.iter().any(|(address, answer)| address.is_ipv4() && answer.is_ok());
    answers.retain(|(address, answer)| address.is_ipv4() || answer.is_ok() || !v4_answers);
    let is_only = answers.len() == 1;
    let named = |address: SocketAddr| if is_only { name.to_string() } else { format!("{name} at {address}") };
    answers.into_iter().map(|(address, answer)| (named(address), answer)).collect()
}

fn late(peer: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "no answer from {peer} within {} s: see `larder status`, and check that UDP packets reach this address",
        PATIENCE.as_secs()
    )
}

/// The time in which a connected node must answer: it waits five seconds for an actor that hangs.
const ANSWER_PATIENCE: Duration = Duration::from_secs(8);

/// The time in which a node must be connected, or a coordinator must answer.
const PATIENCE: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use serde_json::json;

    use super::*;
    use crate::cluster::tests::server;

    #[test]
    fn every_address_of_a_name_is_asked() {
        // Coordinators that are too old to name their port.
        let coordinator = || {
            server(
                json!({"role": "coordinator", "version": "1", "uptime_seconds": 1.0, "epoch": "1.1", "follows": false,
                "nodes": [], "lost": []}),
            )
        };
        let addresses = vec![coordinator(), coordinator(), (Ipv6Addr::LOCALHOST, 1).into()];
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let name = HostPort::of_coordinator("larder-coordinator").unwrap();
        let answers = runtime.block_on(ask_addresses(&name, addresses.clone(), &peer_of_coordinator));
        for address in addresses {
            let is_it = |(name, _): &&(String, _)| *name == format!("larder-coordinator:7600 at {address}");
            let (_, answer) = answers.iter().find(is_it).expect("each is asked");
            let error = answer.as_ref().unwrap_err().to_string();
            assert_eq!(error.contains("older version"), address.is_ipv4(), "{error}");
        }
    }
}
