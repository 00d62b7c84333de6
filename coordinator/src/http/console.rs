//! The console: its page, and the page's requests.
//!
//! The page's files are built from `coordinator/console` by npm, and are a part of this program. Reading needs the token of
//! `[http] console_token_file`; without such a file, everybody reads over loopback, and nobody from elsewhere. Changes need the
//! admin's token. Pages of other origins get no answer. Neither do requests by a name that leads to loopback: a page elsewhere
//! could have a browser send them.

use std::net::IpAddr;
use std::path::PathBuf;

use actix_web::error::ErrorServiceUnavailable;
use actix_web::http::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, HeaderValue, ORIGIN};
use actix_web::http::{StatusCode, Uri};
use actix_web::web::{Data, Payload, Query};
use actix_web::{HttpRequest, HttpResponse};
use larder_net::blocking::try_blocking;
use larder_net::http::{arguments, in_pieces};
use larder_protocol::drain::{AfterDrain, DrainCommand, DrainStart};
use larder_protocol::limits::MAX_CHAIN_CHUNKS;
use larder_protocol::peer::{PeerRequest, Show};
use larder_protocol::pin::{PinCommand, PinStart};
use larder_protocol::purge::{PurgeMode, PurgeScope};
use larder_protocol::{ChunkHash, Fingerprint};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use super::HttpState;
use super::bodies::busy;
use crate::gather::{NodeQuery, Shown, Wanted};

/// The token in a file, which is read for each request, so that a replaced token is not right any more. Without a file, no token
/// is right.
pub(crate) struct Token(Option<PathBuf>);

/// The tokens of the console's users.
pub(crate) struct Tokens {
    /// For reading. If there is none, everybody reads over loopback.
    pub(crate) read: Token,
    /// For reading, and for changes.
    pub(crate) admin: Token,
}

/// A page's question to nodes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConsoleQuery {
    /// The path at the nodes, with its query.
    path: String,
    /// The node; all nodes if it is not given.
    node: Option<String>,
}

/// A node in the body of `/console/nodes`, a list.
#[derive(Debug, Serialize)]
struct NodeSaid<'a> {
    /// The node's name.
    node: &'a str,
    /// The answer of the node's own HTTP server, unchanged; `None` without an answer.
    said: Option<serde_json::Value>,
    /// Why there is no answer.
    error: Option<&'a str>,
}

/// Why a page gets no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum Refused {
    /// A page of another origin asks.
    #[error(
        "a page of another origin may not use the console's addresses; a proxy before the coordinator must pass on the browser's header Host"
    )]
    Origin,
    /// The request names another host.
    #[error("reach the coordinator by an IP address or as localhost, or send the console's token")]
    Host,
    /// The token is missing or wrong.
    #[error(
        "this request needs the console's token; `console_token_file` in [http] of the coordinator's configuration names its file"
    )]
    Token,
    /// The admin's token is missing or wrong.
    #[error(
        "a change needs the admin's token; `console_admin_token_file` in [http] of the coordinator's configuration names its file"
    )]
    Admin,
}

/// A change that an admin asks for.
#[derive(Debug, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case", deny_unknown_fields)]
enum Change {
    /// Change the eviction policy.
    Policy {
        /// The node; all nodes if it is not given.
        node: Option<String>,
        /// The policy.
        policy: String,
    },
    /// Drain a node, which then leaves.
    Drain {
        /// The node.
        node: String,
        /// Time for the drain.
        within_seconds: u32,
    },
    /// Cancel a drain.
    CancelDrain {
        /// The node.
        node: String,
    },
    /// Keep a prompt from eviction, wherever its first chunks are in memory.
    Pin {
        /// The namespace: 64 hexadecimal digits.
        fingerprint: String,
        /// The prompt's chunks from its first on, 64 hexadecimal digits each.
        hashes: Vec<String>,
        /// Time of the pin; a node may grant less.
        within_seconds: u32,
    },
    /// End a pin.
    Unpin {
        /// The node.
        node: String,
        /// The device.
        device: u16,
        /// The pin's number at the device.
        pin: u64,
    },
    /// Remove chunks from memory, disk and object store.
    Purge {
        /// The tenant whose chunks go; null for chunks of a namespace.
        tenant: Option<String>,
        /// The namespace: its fingerprint, or the first 16 digits of it.
        namespace: Option<String>,
        /// Only these chunks of the namespace, and all that continue them; all chunks if the list is empty.
        hashes: Vec<String>,
        /// Whether they are only counted.
        dry_run: bool,
    },
    /// Forget a lost node that will never come back.
    Forget {
        /// The node.
        node: String,
    },
}

/// Who carries out a change.
#[derive(Debug)]
enum Asked {
    /// This node, or all nodes.
    Nodes(Option<String>, Wanted),
    /// This coordinator forgets the node.
    Forget(String),
}

/// A tenant in a node's list.
#[derive(Deserialize)]
struct NamedTenant {
    tenant: String,
}

impl Change {
    /// The change, in the form in which it is carried out.
    fn asked(self) -> Result<Asked, String> {
        let request = |node, request| Ok(Asked::Nodes(node, Wanted::Answer(request)));
        match self {
            Self::Policy { node, policy } => request(node, PeerRequest::SetPolicy(policy)),
            Self::Drain { node, within_seconds } => {
                let within_ms = u64::from(within_seconds) * 1_000;
                let start = DrainStart { within_ms, bytes_per_second: None, then: AfterDrain::Stop };
                request(Some(node), PeerRequest::Drain(DrainCommand::Start(start)))
            }
            Self::CancelDrain { node } => request(Some(node), PeerRequest::Drain(DrainCommand::Cancel)),
            Self::Pin { fingerprint, hashes, within_seconds } => {
                let fingerprint: ChunkHash =
                    fingerprint.parse().map_err(|error| format!("fingerprint: {error}"))?;
                let start = PinStart {
                    fingerprint: Fingerprint(fingerprint.0),
                    hashes: chunks(&hashes)?,
                    duration_ms: u64::from(within_seconds) * 1_000,
                };
                request(None, PeerRequest::Pin(Box::new(PinCommand::Start(start))))
            }
            Self::Unpin { node, device, pin } => {
                request(Some(node), PeerRequest::Pin(Box::new(PinCommand::End(device, pin))))
            }
            Self::Purge { tenant, namespace, hashes, dry_run } => {
                let scope = match (tenant, namespace) {
                    (Some(tenant), None) if hashes.is_empty() => PurgeScope::Tenant(tenant),
                    (None, Some(namespace)) => {
                        let name = namespace.parse().map_err(|error| format!("namespace: {error}"))?;
                        match hashes.is_empty() {
                            true => PurgeScope::Namespace(name),
                            false => PurgeScope::Chunks(name, chunks(&hashes)?),
                        }
                    }
                    _ => return Err("name a tenant, or a namespace and perhaps chunks of it".to_owned()),
                };
                let mode = if dry_run { PurgeMode::Count } else { PurgeMode::Remove };
                Ok(Asked::Nodes(None, Wanted::Purge(scope, mode)))
            }
            Self::Forget { node } => Ok(Asked::Forget(node)),
        }
    }
}

fn chunks(hashes: &[String]) -> Result<Vec<ChunkHash>, String> {
    if hashes.len() > MAX_CHAIN_CHUNKS {
        return Err(format!("at most {MAX_CHAIN_CHUNKS} chunks"));
    }
    hashes.iter().map(|hash| hash.parse().map_err(|error| format!("hashes: {error}"))).collect()
}

impl Token {
    pub(crate) fn new(file: Option<PathBuf>) -> Self {
        Self(file)
    }

    /// The token that the file has now; empty if there is none.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn read(&self) -> std::io::Result<String> {
        let Some(file) = &self.0 else { return Ok(String::new()) };
        // Reading something else than a file could wait for ever.
        if !file.metadata()?.is_file() {
            return Err(std::io::Error::other("it is no regular file"));
        }
        Ok(std::fs::read_to_string(file)?.trim().to_owned())
    }

    fn is(&self, given: Option<&str>) -> bool {
        let Some(given) = given else { return false };
        let token = self.read().unwrap_or_else(|error| {
            tracing::warn!(%error, file = ?self.0, "cannot read a token of the console: no token is right");
            String::new()
        });
        let (token, given) = (token.as_bytes(), given.as_bytes());
        // A wrong byte takes as long as a right one.
        let differences = token.iter().zip(given).fold(0, |all, (a, b)| all | (a ^ b));
        token.len() == given.len() && !token.is_empty() && differences == 0
    }
}

/// The page.
pub(super) async fn page() -> HttpResponse {
    file("text/html; charset=utf-8", include_bytes!("../../console/dist/index.html"))
}

/// The page's script.
pub(super) async fn script() -> HttpResponse {
    file("text/javascript; charset=utf-8", include_bytes!("../../console/dist/console.js"))
}

/// The page's style.
pub(super) async fn style() -> HttpResponse {
    file("text/css; charset=utf-8", include_bytes!("../../console/dist/console.css"))
}

/// Asks the nodes a question.
pub(super) async fn nodes(
    state: Data<HttpState>,
    request: HttpRequest,
    asked: Query<ConsoleQuery>,
    payload: Payload,
) -> actix_web::Result<HttpResponse> {
    if let Some(refused) = refuse_strangers(&state, &request) {
        return Ok(refused);
    }
    let body = state.bodies.read(&request, payload).await?;
    let body = body.understand(|bytes| Ok(bytes.to_vec())).await?;
    if body.len() > MOST_BODY_BYTES {
        return Ok(HttpResponse::PayloadTooLarge().body("a question to nodes is shorter\n"));
    }
    let ConsoleQuery { path, node } = asked.into_inner();
    ask(&state, Wanted::Answer(PeerRequest::Show(Show { path, body })), node).await
}

/// The last hour.
pub(super) async fn history(state: Data<HttpState>, request: HttpRequest) -> actix_web::Result<HttpResponse> {
    if let Some(refused) = refuse_strangers(&state, &request) {
        return Ok(refused);
    }
    if let Some(refused) = refuse_arguments(&request) {
        return Ok(refused);
    }
    let mut response = in_pieces("application/json", serde_json::to_vec(&state.history.moments())?);
    harden(response.headers_mut());
    Ok(response)
}

/// Carries out an admin's change.
pub(super) async fn change(
    state: Data<HttpState>,
    request: HttpRequest,
    payload: Payload,
) -> actix_web::Result<HttpResponse> {
    if let Err(refused) = may_change(request.headers(), &state.console_tokens) {
        return Ok(refused.answer());
    }
    let body = state.bodies.read(&request, payload).await?;
    let read = |bytes: &[u8]| {
        let change = serde_json::from_slice::<Change>(bytes).map_err(|error| format!("{error}\n"))?;
        change.asked().map_err(|error| format!("{error}\n"))
    };
    let (node, wanted) = match body.understand(move |bytes| read(&bytes)).await? {
        Asked::Nodes(node, wanted) => (node, wanted),
        Asked::Forget(node) => return Ok(forget(&state, &node)),
    };
    if let Wanted::Purge(PurgeScope::Tenant(tenant), _) = &wanted
        && let Some(unknown) = refuse_unknown_tenant(&state, tenant).await
    {
        return Ok(unknown);
    }
    tracing::info!(%wanted, node, "the console's admin asks for a change");
    let shown = gather(&state, wanted, node.clone()).await?;
    match node {
        // A list without a node would look like a change that was made.
        Some(node) if shown.is_empty() => {
            Ok(HttpResponse::BadRequest().body(format!("the coordinator knows no node `{node}`\n")))
        }
        None if shown.is_empty() => Ok(HttpResponse::BadRequest().body("the coordinator knows no nodes\n")),
        _ => Ok(answer(shown).await),
    }
}

/// Forgets a lost node. An empty list is the answer of no node.
fn forget(state: &HttpState, node: &str) -> HttpResponse {
    match state.membership.forget(node, "the console's admin", &state.audit) {
        Ok(true) => HttpResponse::Ok().content_type("application/json").body("[]"),
        Ok(false) => HttpResponse::BadRequest().body(format!("there is no lost node `{node}`\n")),
        Err(refused) => HttpResponse::BadRequest().body(format!("{refused}\n")),
    }
}

/// The refusal of a request that may not read; `None` if the request may.
pub(super) fn refuse_strangers(state: &HttpState, request: &HttpRequest) -> Option<HttpResponse> {
    let is_near = request.peer_addr().is_some_and(|from| from.ip().to_canonical().is_loopback());
    may_read(request.headers(), is_near, &state.console_tokens).err().map(Refused::answer)
}

/// The refusal of a request with arguments, on a path that takes none.
pub(super) fn refuse_arguments(request: &HttpRequest) -> Option<HttpResponse> {
    let refused = arguments(request.path(), request.query_string(), &[]).err()?;
    Some(HttpResponse::BadRequest().body(format!("{refused}\n")))
}

/// The refusal of a purge of a tenant that no node has: a wrong name would look like a purge that found nothing. `None` if a node
/// has the tenant, or does not say so.
async fn refuse_unknown_tenant(state: &HttpState, tenant: &str) -> Option<HttpResponse> {
    let tenants = Show { path: "/tenants".to_owned(), body: Vec::new() };
    let shown = gather(state, Wanted::Answer(PeerRequest::Show(tenants)), None).await.ok()?;
    let has = |one: &Shown| -> Option<bool> {
        let tenants: Vec<NamedTenant> = serde_json::from_slice(one.said.as_ref().ok()?).ok()?;
        Some(tenants.iter().any(|known| known.tenant == tenant))
    };
    let is_unknown = !shown.is_empty() && shown.iter().all(|one| has(one) == Some(false));
    is_unknown.then(|| HttpResponse::BadRequest().body(format!("no node has a tenant `{tenant}`\n")))
}

async fn ask(state: &HttpState, wanted: Wanted, node: Option<String>) -> actix_web::Result<HttpResponse> {
    Ok(answer(gather(state, wanted, node).await?).await)
}

async fn answer(shown: Vec<Shown>) -> HttpResponse {
    let json = try_blocking(move || json_of(&shown)).await;
    let mut response = in_pieces("application/json", json.unwrap_or_default());
    harden(response.headers_mut());
    response
}

/// The nodes' answers; an error if they cannot be asked.
async fn gather(state: &HttpState, wanted: Wanted, node: Option<String>) -> actix_web::Result<Vec<Shown>> {
    let (answer, answered) = oneshot::channel();
    if state.gathers.try_send(NodeQuery { wanted, node, answer }).is_err() {
        return Err(busy());
    }
    let nobody = "the coordinator cannot ask the nodes: is an admin configured?\n";
    answered.await.map_err(|_| ErrorServiceUnavailable(nobody))
}

impl Refused {
    fn answer(self) -> HttpResponse {
        let status = match self {
            Self::Token | Self::Admin => StatusCode::UNAUTHORIZED,
            Self::Origin | Self::Host => StatusCode::FORBIDDEN,
        };
        HttpResponse::build(status).body(format!("{self}\n"))
    }
}

fn json_of(shown: &[Shown]) -> Vec<u8> {
    let said = |one: &Shown| one.said.as_ref().ok().and_then(|json| serde_json::from_slice(json).ok());
    let all: Vec<NodeSaid<'_>> = shown
        .iter()
        .map(|one| NodeSaid {
            node: &one.node,
            said: said(one),
            error: one.said.as_ref().err().map(String::as_str),
        })
        .collect();
    // JSON that was read can be written.
    serde_json::to_vec(&all).unwrap_or_default()
}

fn may_read(headers: &HeaderMap, is_near: bool, tokens: &Tokens) -> Result<(), Refused> {
    check_origin(headers)?;
    let given = given_token(headers);
    if tokens.read.is(given) || tokens.admin.is(given) {
        return Ok(());
    }
    // A proxy of the pod, such as a service mesh's, makes everybody near: a token, if there is one, is needed from everywhere.
    if !is_near || tokens.read.0.is_some() {
        return Err(Refused::Token);
    }
    if is_plain(text(headers, HOST).unwrap_or_default()) { Ok(()) } else { Err(Refused::Host) }
}

/// A change needs the token wherever it comes from.
fn may_change(headers: &HeaderMap, tokens: &Tokens) -> Result<(), Refused> {
    check_origin(headers)?;
    if tokens.admin.is(given_token(headers)) { Ok(()) } else { Err(Refused::Admin) }
}

/// A page may ask the server that it came from; pages of other origins may not.
fn check_origin(headers: &HeaderMap) -> Result<(), Refused> {
    let host = text(headers, HOST).unwrap_or_default();
    let is_own = |origin: &str| {
        let authority = origin.parse::<Uri>().ok().and_then(|uri| Some(uri.authority()?.as_str().to_owned()));
        authority.is_some_and(|authority| authority.eq_ignore_ascii_case(host))
    };
    if headers.contains_key(ORIGIN) && !text(headers, ORIGIN).is_some_and(is_own) {
        return Err(Refused::Origin);
    }
    Ok(())
}

fn given_token(headers: &HeaderMap) -> Option<&str> {
    text(headers, AUTHORIZATION)?.strip_prefix("Bearer ")
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// Whether a host is safe: not a name that somebody else's DNS could lead to loopback.
fn is_plain(host: &str) -> bool {
    let authority = host.parse::<Uri>().ok().and_then(|uri| uri.authority().cloned());
    let host = authority.as_ref().map_or("", |authority| authority.host());
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok()
}

fn file(content_type: &'static str, bytes: &'static [u8]) -> HttpResponse {
    let mut response = in_pieces(content_type, bytes);
    harden(response.headers_mut());
    response
}

/// Adds the headers that bound what a browser may do with an answer.
pub(super) fn harden(headers: &mut HeaderMap) {
    for (name, value) in [
        ("content-security-policy", POLICY),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-store"),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
}

/// All content comes from this server, and no other page shows the console in a frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Bytes of a question to nodes: it has to fit a message between servers.
const MOST_BODY_BYTES: usize = 900 << 10;

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    /// Reads over loopback if there is no token (`is_near`), or from elsewhere if there is one.
    fn read(headers: &[(&'static str, &str)], is_near: bool) -> Result<(), Refused> {
        let folder = tempfile::tempdir().unwrap();
        let tokens = tokens(folder.path());
        let tokens = if is_near { Tokens { read: Token::new(None), ..tokens } } else { tokens };
        may_read(&map(headers), is_near, &tokens)
    }

    fn map(headers: &[(&'static str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        };
        headers.iter().map(pair).collect()
    }

    fn tokens(folder: &std::path::Path) -> Tokens {
        let token = |name: &str, text: &str| {
            let file = folder.join(name);
            std::fs::write(&file, text).unwrap();
            Token::new(Some(file))
        };
        Tokens { read: token("read", "secret\n"), admin: token("admin", "admin") }
    }

    #[test]
    fn a_token_is_right_as_long_as_it_is_in_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let Tokens { admin, .. } = tokens(folder.path());
        assert!(admin.is(Some("admin")) && !admin.is(Some("other")) && !admin.is(Some("")));
        std::fs::write(folder.path().join("admin"), "other\n").unwrap();
        assert!(admin.is(Some("other")) && !admin.is(Some("admin")));
        std::fs::write(folder.path().join("admin"), " \n").unwrap();
        assert!(!admin.is(Some("other")) && !admin.is(Some("")));
        std::fs::remove_file(folder.path().join("admin")).unwrap();
        assert!(!admin.is(Some("other")) && !admin.is(Some("")));
        assert!(!Token::new(None).is(Some("")));
    }

    #[test]
    fn no_token_is_read_from_a_pipe() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("token");
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        assert!(Token::new(Some(pipe)).read().unwrap_err().to_string().contains("no regular file"));
    }

    #[test]
    fn a_change_needs_the_admins_token_even_on_loopback() {
        let change = |headers: &[(&'static str, &str)]| {
            let folder = tempfile::tempdir().unwrap();
            may_change(&map(headers), &tokens(folder.path()))
        };
        let host = ("host", "127.0.0.1:7600");
        assert_eq!(change(&[host]), Err(Refused::Admin));
        assert_eq!(change(&[host, ("authorization", "Bearer secret")]), Err(Refused::Admin), "a reader's");
        let admin = ("authorization", "Bearer admin");
        assert_eq!(change(&[host, admin]), Ok(()));
        assert_eq!(change(&[host, admin, ("origin", "http://evil.example")]), Err(Refused::Origin));
        assert_eq!(read(&[host, admin], false), Ok(()), "an admin reads, too");
    }

    #[test]
    fn a_purge_names_a_tenant_or_a_namespace_and_its_chunks_are_hashes() {
        let wanted = |json: &str| serde_json::from_str::<Change>(json).unwrap().asked();
        let tenant =
            wanted(r#"{"action": "purge", "tenant": "chat", "hashes": [], "dry_run": true}"#).unwrap();
        assert!(matches!(tenant, Asked::Nodes(None, Wanted::Purge(PurgeScope::Tenant(_), PurgeMode::Count))));
        let hash = "ab".repeat(32);
        let chunks = format!(
            r#"{{"action": "purge", "namespace": "{hash}", "hashes": ["{hash}"], "dry_run": false}}"#
        );
        assert!(matches!(
            wanted(&chunks).unwrap(),
            Asked::Nodes(None, Wanted::Purge(PurgeScope::Chunks(..), PurgeMode::Remove))
        ));
        for wrong in [
            r#"{"action": "purge", "hashes": [], "dry_run": false}"#,
            r#"{"action": "purge", "tenant": "a", "namespace": "abababababababab", "hashes": [], "dry_run": false}"#,
            r#"{"action": "purge", "tenant": "a", "hashes": ["00"], "dry_run": false}"#,
            r#"{"action": "purge", "namespace": "abab", "hashes": [], "dry_run": false}"#,
            r#"{"action": "pin", "fingerprint": "abab", "hashes": [], "within_seconds": 1}"#,
        ] {
            assert!(wanted(wrong).is_err(), "{wrong}");
        }
        let long = format!("[{}]", vec![format!("\"{hash}\""); MAX_CHAIN_CHUNKS + 1].join(","));
        let long =
            format!(r#"{{"action": "pin", "fingerprint": "{hash}", "hashes": {long}, "within_seconds": 1}}"#);
        assert_eq!(wanted(&long).unwrap_err(), format!("at most {MAX_CHAIN_CHUNKS} chunks"));
    }

    #[test]
    fn loopback_reads_if_there_is_no_token_and_others_need_it() {
        for host in ["127.0.0.1:7600", "[::1]:7600", "localhost:7600", "10.0.0.1"] {
            assert_eq!(read(&[("host", host)], true), Ok(()), "{host}");
            assert_eq!(read(&[("host", host)], false), Err(Refused::Token));
            assert_eq!(read(&[("host", host), ("authorization", "Bearer secret")], false), Ok(()));
            assert_eq!(
                read(&[("host", host), ("authorization", "Bearer secre")], false),
                Err(Refused::Token)
            );
        }
    }

    #[test]
    fn loopback_needs_the_token_too_if_there_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let tokens = tokens(folder.path());
        let host = ("host", "127.0.0.1:7600");
        assert_eq!(may_read(&map(&[host]), true, &tokens), Err(Refused::Token), "a proxy may have sent it");
        assert_eq!(may_read(&map(&[host, ("authorization", "Bearer secret")]), true, &tokens), Ok(()));
    }

    #[test]
    fn a_name_that_leads_to_loopback_is_refused() {
        assert_eq!(read(&[("host", "evil.example:7600")], true), Err(Refused::Host));
        assert_eq!(read(&[], true), Err(Refused::Host));
        let with_token = [("host", "larder.example"), ("authorization", "Bearer secret")];
        assert_eq!(read(&with_token, false), Ok(()));
    }

    #[test]
    fn a_page_of_another_origin_is_refused_even_with_the_token() {
        let own = [("host", "127.0.0.1:7600"), ("origin", "http://127.0.0.1:7600")];
        assert_eq!(read(&own, true), Ok(()));
        for origin in ["http://evil.example", "null", "http://127.0.0.1:7601"] {
            let asked = [("host", "127.0.0.1:7600"), ("origin", origin), ("authorization", "Bearer secret")];
            assert_eq!(read(&asked, true), Err(Refused::Origin), "{origin}");
        }
    }
}
