//! A stand-in for the API server of Kubernetes: it keeps Leases as a real server does, and often fails as a real server seldom
//! does.

use std::collections::BTreeMap;
use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fs, thread};

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use crate::http::{Request, read_request};
use crate::tls::Files;

/// An API server on a free port. Its threads live as long as the test.
pub struct ApiServer {
    address: SocketAddr,
    ca_pem: Option<String>,
    state: Arc<Mutex<State>>,
}

/// Something that happens to one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Trouble {
    /// A write is refused although there was no other write.
    Conflict,
    /// 429: come back after this many seconds.
    TooMany(u64),
    /// 500, and nothing is done.
    Failure,
    /// The connection ends before anything is done.
    Lost,
    /// The request is carried out, and then the connection ends.
    AnswerLost,
    /// 504 of a proxy in between: the request is carried out, but its answer does not come.
    Timeout,
    /// The request is carried out after this many milliseconds.
    Late(u64),
    /// A read finds the state before the last write.
    Stale,
    /// A read finds a time of renewal that is this many hours off.
    Skewed(i8),
    /// An answer that is no JSON, with status 200.
    Garbage,
}

/// An account and its rights.
#[derive(Debug, Clone)]
pub struct Account {
    /// The token that it shows.
    pub token: &'static str,
    /// Rights: a verb, and the only Lease for which the verb is allowed.
    pub rights: &'static [(&'static str, Option<&'static str>)],
}

/// A finished write.
#[derive(Debug, Clone, PartialEq)]
pub struct Written {
    /// The version of the Lease before the write; `None` if it made the Lease.
    pub over: Option<String>,
    /// The Lease after it.
    pub lease: Value,
}

#[derive(Default)]
struct State {
    revision: u64,
    leases: BTreeMap<String, Vec<Value>>,
    accounts: Vec<Account>,
    next: Vec<Trouble>,
    weather: Option<(fastrand::Rng, u8, Vec<Trouble>)>,
    written: Vec<Written>,
    happened: BTreeMap<Trouble, usize>,
    requests: usize,
}

impl ApiServer {
    /// Starts a server without TLS. It has the namespace `larder` and one account with all rights.
    ///
    /// # Errors
    /// Fails if there is no port.
    pub fn start() -> anyhow::Result<Self> {
        Self::start_on(TcpListener::bind("127.0.0.1:0")?, None)
    }

    /// As [`Self::start`], on this listener, and with TLS for 127.0.0.1 if `tls` has the files for it.
    ///
    /// # Errors
    /// Fails if the files cannot be used.
    pub fn start_on(listener: TcpListener, tls: Option<&Files>) -> anyhow::Result<Self> {
        let state = State { accounts: vec![ALL_RIGHTS], ..State::default() };
        let (address, state) = (listener.local_addr()?, Arc::new(Mutex::new(state)));
        let ca_pem = tls.map(|files| files.ca_pem.clone());
        let config = tls.map(server_config).transpose()?.map(Arc::new);
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (state, config) = (Arc::clone(&shared), config.clone());
                // An error: the client went away, or was turned away.
                thread::spawn(move || _ = serve_one(stream, config, &state));
            }
        });
        Ok(Self { address, ca_pem, state })
    }

    /// The address on which the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The certificate of the server's authority, if the server has TLS.
    pub fn ca_pem(&self) -> Option<&str> {
        self.ca_pem.as_deref()
    }

    /// Writes a kubeconfig for an account into a folder.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn kubeconfig(&self, folder: &Path, account: &Account, namespace: &str) -> anyhow::Result<PathBuf> {
        let path = folder.join(format!("{}.{namespace}.kubeconfig", account.token));
        let scheme = if self.ca_pem.is_some() { "https" } else { "http" };
        let mut cluster = json!({"server": format!("{scheme}://{}", self.address)});
        if let Some(ca) = &self.ca_pem {
            let file = folder.join("kubernetes-ca.pem");
            fs::write(&file, ca)?;
            cluster["certificate-authority"] = json!(file);
        }
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": account.token}}],
            "contexts": [{
                "name": "test",
                "context": {"cluster": "test", "user": "test", "namespace": namespace},
            }],
        });
        fs::write(&path, config.to_string())?;
        Ok(path)
    }

    /// Admits another account.
    pub fn admit(&self, account: Account) {
        self.state().accounts.push(account);
    }

    /// Makes these troubles happen to the next requests, one trouble each.
    pub fn next(&self, troubles: &[Trouble]) {
        self.state().next = troubles.iter().rev().copied().collect();
    }

    /// From now on, makes one of these troubles happen to `percent` percent of the requests; without troubles, to none.
    pub fn weather(&self, seed: u64, percent: u8, troubles: &[Trouble]) {
        let weather = (fastrand::Rng::with_seed(seed), percent, troubles.to_vec());
        self.state().weather = Some(weather).filter(|_| !troubles.is_empty());
    }

    /// The present state of a Lease.
    pub fn lease(&self, name: &str) -> Option<Value> {
        self.state().leases.get(name)?.last().cloned()
    }

    /// Writes a Lease, as an operator does with `kubectl`.
    pub fn put(&self, name: &str, lease: Value) {
        self.state().keep(name, None, lease);
    }

    /// Changes a Lease by a merge patch, as an operator does with `kubectl`.
    pub fn patch(&self, name: &str, patch: &Value) {
        let mut lease = self.lease(name).unwrap_or_default();
        merge(&mut lease, patch);
        self.put(name, lease);
    }

    /// Deletes a Lease, as an operator does with `kubectl`.
    pub fn delete(&self, name: &str) {
        self.state().leases.remove(name);
    }

    /// All writes so far.
    pub fn written(&self) -> Vec<Written> {
        self.state().written.clone()
    }

    /// The number of times that each trouble happened.
    pub fn happened(&self) -> BTreeMap<Trouble, usize> {
        self.state().happened.clone()
    }

    /// The number of requests so far.
    pub fn requests(&self) -> usize {
        self.state().requests
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An account with all rights.
pub const ALL_RIGHTS: Account =
    Account { token: "all-rights", rights: &[("get", None), ("create", None), ("patch", None)] };

fn server_config(files: &Files) -> anyhow::Result<ServerConfig> {
    let chain = CertificateDer::pem_slice_iter(files.certificate_pem.as_bytes()).collect::<Result<_, _>>()?;
    let key = PrivateKeyDer::from_pem_slice(files.key_pem.as_bytes())?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(config.with_no_client_auth().with_single_cert(chain, key)?)
}

fn serve_one(stream: TcpStream, tls: Option<Arc<ServerConfig>>, state: &Mutex<State>) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    match tls {
        Some(config) => serve(StreamOwned::new(ServerConnection::new(config)?, stream), state),
        None => serve(stream, state),
    }
}

fn serve(stream: impl Read + Write, state: &Mutex<State>) -> anyhow::Result<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let request = read_request(&mut stream)?;
        let lock = || state.lock().unwrap_or_else(PoisonError::into_inner);
        let trouble = lock().trouble();
        match trouble {
            Some(Trouble::Lost) => return Ok(()),
            Some(Trouble::Late(ms)) => thread::sleep(Duration::from_millis(ms)),
            _ => {}
        }
        let (status, more, body) = match trouble {
            Some(Trouble::TooMany(seconds)) => (
                429,
                format!("Retry-After: {seconds}\r\n"),
                "Too many requests, please try again later.".into(),
            ),
            Some(Trouble::Failure) => {
                (500, String::new(), status(500, "InternalError", "etcdserver: timeout"))
            }
            Some(Trouble::Conflict) if request.method != "GET" => (409, String::new(), conflict("it")),
            trouble => {
                let (status, body) = lock().answer(&request, trouble);
                (status, String::new(), body)
            }
        };
        let (status, body) = match trouble {
            Some(Trouble::AnswerLost) => return Ok(()),
            Some(Trouble::Timeout) => (504, "upstream request timeout".into()),
            Some(Trouble::Garbage) => (200, "<html>a captive portal</html>".into()),
            _ => (status, body),
        };
        let head = format!(
            "HTTP/1.1 {status} Any\r\nContent-Type: application/json\r\n{more}Content-Length: {}\r\n\r\n",
            body.len()
        );
        let stream = stream.get_mut();
        stream.write_all((head + &body).as_bytes())?;
        stream.flush()?;
    }
}

impl State {
    fn trouble(&mut self) -> Option<Trouble> {
        self.requests += 1;
        let by_chance = || {
            let (random, percent, troubles) = self.weather.as_mut()?;
            (random.u8(..100) < *percent).then(|| troubles[random.usize(..troubles.len())])
        };
        let trouble = self.next.pop().or_else(by_chance)?;
        *self.happened.entry(trouble).or_default() += 1;
        Some(trouble)
    }

    /// Carries out a request, or answers with an error.
    fn answer(&mut self, request: &Request, trouble: Option<Trouble>) -> (u16, String) {
        let token = request.header("authorization").and_then(|value| value.strip_prefix("Bearer "));
        let Some(account) = self.accounts.iter().find(|account| Some(account.token) == token) else {
            return (401, status(401, "Unauthorized", "Unauthorized"));
        };
        let (path, _) = request.path.split_once('?').unwrap_or((&request.path, ""));
        let rest = path.strip_prefix("/apis/coordination.k8s.io/v1/namespaces/");
        let Some((namespace, rest)) = rest.and_then(|rest| rest.split_once('/')) else { return unknown() };
        let name = rest.strip_prefix("leases/");
        let verb = match (request.method.as_str(), name, rest) {
            ("GET", Some(_), _) => "get",
            ("PATCH", Some(_), _) => "patch",
            ("POST", None, "leases") => "create",
            _ => return unknown(),
        };
        let may = |&(of, only): &(&str, Option<&str>)| of == verb && (only.is_none() || only == name);
        if !account.rights.iter().any(may) {
            return (403, status(403, "Forbidden", &forbidden(account.token, verb, name, namespace)));
        }
        match (name, request.json()) {
            (Some(name), _) if verb == "get" => self.get(namespace, name, trouble),
            (Some(name), Some(body)) => self.patch(request, namespace, name, &body),
            (None, Some(body)) => self.create(namespace, body),
            (_, None) => (400, status(400, "BadRequest", "the body is no JSON")),
        }
    }

    fn get(&self, namespace: &str, name: &str, trouble: Option<Trouble>) -> (u16, String) {
        let versions = self.leases.get(name).filter(|_| namespace == NAMESPACE);
        let back = usize::from(trouble == Some(Trouble::Stale));
        let Some(lease) = versions.and_then(|all| all.iter().rev().nth(back).or(all.first())) else {
            return missing("leases.coordination.k8s.io", name);
        };
        let mut lease = lease.clone();
        if let Some(Trouble::Skewed(hours)) = trouble {
            lease["spec"]["renewTime"] = format!("20{:02}-01-01T00:00:00.000000Z", 50 + hours).into();
        }
        (200, lease.to_string())
    }

    fn create(&mut self, namespace: &str, mut lease: Value) -> (u16, String) {
        if namespace != NAMESPACE {
            return missing("namespaces", namespace);
        }
        let Some(name) = lease["metadata"]["name"].as_str().map(str::to_owned) else {
            return (422, status(422, "Invalid", "name or generateName is required"));
        };
        if self.leases.contains_key(&name) {
            let message = format!("leases.coordination.k8s.io \"{name}\" already exists");
            return (409, status(409, "AlreadyExists", &message));
        }
        if let Some(message) = invalid(&lease) {
            return (422, status(422, "Invalid", &message));
        }
        lease["metadata"]["namespace"] = namespace.into();
        self.keep(&name, None, lease.clone());
        (201, self.leases[&name][0].to_string())
    }

    fn patch(&mut self, request: &Request, namespace: &str, name: &str, patch: &Value) -> (u16, String) {
        if request.header("content-type") != Some("application/merge-patch+json") {
            return (415, status(415, "UnsupportedMediaType", "a merge patch is expected"));
        }
        let known = self.leases.get(name).filter(|_| namespace == NAMESPACE);
        let Some(old) = known.and_then(|all| all.last()).cloned() else {
            return missing("leases.coordination.k8s.io", name);
        };
        let mut new = old.clone();
        merge(&mut new, patch);
        if new["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"] {
            return (409, conflict(name));
        }
        if let Some(message) = invalid(&new) {
            return (422, status(422, "Invalid", &message));
        }
        // A patch that changes nothing is not written, and makes no new version.
        if new != old {
            self.keep(name, old["metadata"]["resourceVersion"].as_str().map(str::to_owned), new);
        }
        (200, self.leases[name].last().unwrap_or(&old).to_string())
    }

    fn keep(&mut self, name: &str, over: Option<String>, mut lease: Value) {
        self.revision += 1;
        lease["metadata"]["name"] = name.into();
        lease["metadata"]["resourceVersion"] = self.revision.to_string().into();
        self.written.push(Written { over, lease: lease.clone() });
        let versions = self.leases.entry(name.to_owned()).or_default();
        versions.push(lease);
        // One earlier version, for stale reads.
        versions.drain(..versions.len().saturating_sub(2));
    }
}

/// A merge patch, as RFC 7386 has it.
fn merge(into: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *into = patch.clone();
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    for (key, value) in patch {
        match value {
            Value::Null => _ = into.as_object_mut().and_then(|into| into.remove(key)),
            value => merge(&mut into[key], value),
        }
    }
}

/// The fault of a Lease, if any.
fn invalid(lease: &Value) -> Option<String> {
    let spec = &lease["spec"];
    if spec["leaseDurationSeconds"]
        .as_i64()
        .is_some_and(|seconds| i32::try_from(seconds).is_err() || seconds < 1)
    {
        return Some("spec.leaseDurationSeconds: Invalid value: must be greater than 0".into());
    }
    if spec["leaseTransitions"].as_i64().is_some_and(|count| i32::try_from(count).is_err() || count < 0) {
        return Some("spec.leaseTransitions: Invalid value: must be greater than or equal to 0".into());
    }
    // As 2026-01-02T03:04:05.000006Z.
    let is_micro_time = |time: &str| time.len() == 27 && time.as_bytes()[19] == b'.' && time.ends_with('Z');
    let is_wrong = |time: &Value| time.as_str().is_some_and(|time| !is_micro_time(time));
    (is_wrong(&spec["renewTime"]) || is_wrong(&spec["acquireTime"])).then(|| "a time is no MicroTime".into())
}

fn unknown() -> (u16, String) {
    (404, "404 page not found".into())
}

fn missing(resource: &str, name: &str) -> (u16, String) {
    (404, status(404, "NotFound", &format!("{resource} \"{name}\" not found")))
}

fn conflict(name: &str) -> String {
    let message = format!(
        "Operation cannot be fulfilled on leases.coordination.k8s.io \"{name}\": the object has been modified; please \
         apply your changes to the latest version and try again"
    );
    status(409, "Conflict", &message)
}

fn forbidden(account: &str, verb: &str, name: Option<&str>, namespace: &str) -> String {
    let name = name.map(|name| format!(" \"{name}\"")).unwrap_or_default();
    format!(
        "leases.coordination.k8s.io{name} is forbidden: User \"system:serviceaccount:{namespace}:{account}\" cannot {verb} \
         resource \"leases\" in API group \"coordination.k8s.io\" in the namespace \"{namespace}\""
    )
}

fn status(code: u16, reason: &str, message: &str) -> String {
    json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    })
    .to_string()
}

/// The only namespace.
pub const NAMESPACE: &str = "larder";
