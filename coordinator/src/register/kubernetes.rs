//! A register in Kubernetes: one Lease, compared by its resource version.
//!
//! The record is in an annotation of the Lease. The fields of the Lease repeat it for users of `kubectl`. They decide
//! nothing, except that a Lease with a foreign holder is refused. A write names the resource version that it replaces, so the API
//! server does at most one of two.

use std::cell::Cell;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt as _, Limited};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{GetParams, Patch, PatchParams, PostParams, Request, Resource as _, ResourceExt as _};
use kube::client::Body;
use kube::config::{Config, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::Status;
use larder_net::failure::Failure;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};

use super::{Register, Trouble};
use crate::election::{Record, Version};

/// A Lease.
pub struct Kubernetes {
    client: Client,
    leases: Request,
    name: String,
    namespace: String,
    /// The time until which the API server wants no requests.
    paused_until: Cell<Option<Instant>>,
}

impl Kubernetes {
    /// Uses this Lease in the namespace of the account. It connects when it is asked.
    ///
    /// # Errors
    /// There is no way to the API server.
    ///
    /// # Cancel safety
    /// Safe.
    pub async fn new(kubeconfig: Option<&Path>, name: String) -> Result<Self, Failure> {
        let mut config = match kubeconfig {
            Some(path) => from_file(path).await.map_err(unusable(path))?,
            None => Config::infer().await.map_err(|error| Failure::because(error, NO_CONFIG))?,
        };
        config.connect_timeout = Some(CONNECT_DEADLINE);
        // A write that is repeated after a lost answer would find its own version, and take it for somebody else's.
        config.default_retry = false;
        let namespace = config.default_namespace.clone();
        let client = Client::try_from(config).map_err(no_client)?;
        let leases = Request::new(Lease::url_path(&(), Some(&namespace)));
        Ok(Self { client, leases, name, namespace, paused_until: Cell::new(None) })
    }

    /// Sends a request, as soon as the API server allows one.
    async fn ask(&self, asked: LeaseRequest<'_>) -> Result<Reply, Failure> {
        let (verb, request) = match asked {
            LeaseRequest::Read => (GET, self.leases.get(&self.name, &GetParams::default())),
            LeaseRequest::Make(lease) => {
                (CREATE, self.leases.create(&PostParams::default(), lease.to_string().into_bytes()))
            }
            // A patch leaves the parts of others alone, such as the labels of a chart.
            LeaseRequest::Change(lease) => {
                (PATCH, self.leases.patch(&self.name, &PatchParams::default(), &Patch::Merge(lease)))
            }
        };
        let request = request.map_err(|error| no_client(kube::Error::BuildRequest(error)))?;
        if let Some(until) = self.paused_until.get() {
            sleep_until(until).await;
        }
        let sent = self.client.send(request.map(Body::from)).await;
        let answer = sent.map_err(|error| Failure::because(error, "the API server does not answer"))?;
        let status = answer.status().as_u16();
        let pause = answer.headers().get("retry-after").and_then(|value| pause(value.to_str().ok()?));
        self.paused_until.set(pause.map(|pause| Instant::now() + pause));
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        let body = body.map_err(unreadable)?.to_bytes();
        match status {
            200 | 201 => Ok(Reply::Lease(serde_json::from_slice(&body).map_err(unreadable)?)),
            404 if verb != CREATE => Ok(Reply::Missing),
            409 => Ok(Reply::Conflict),
            _ => Err(Failure::new(self.refusal(verb, status, &message(&body), pause))),
        }
    }

    /// What the API server's answer means if it is neither a Lease nor the state of one.
    fn refusal(&self, verb: &str, status: u16, message: &str, pause: Option<Duration>) -> String {
        let Self { name, namespace, .. } = self;
        match status {
            401 => format!(
                "the API server does not know this account (401): is its token mounted, and is it still valid? {message}"
            ),
            403 => format!(
                "this account may not {verb} the Lease {name} in the namespace {namespace} (403): bind it to a Role with the rule {}. {message}",
                rule(verb, name)
            ),
            404 => format!(
                "there is no namespace {namespace} for the Lease {name} (404): make it, or name another one. {message}"
            ),
            429 | 503 => {
                let pause =
                    pause.map(|pause| format!("; the coordinator waits {pause:?}")).unwrap_or_default();
                format!("the API server has too much to do ({status}){pause}")
            }
            _ => format!(
                "the API server refuses to {verb} the Lease {name} in the namespace {namespace} ({status}): {message}"
            ),
        }
    }

    fn record_of(&self, lease: &Lease) -> Result<Record, Trouble> {
        let Self { name, namespace, .. } = self;
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.as_deref()).unwrap_or_default();
        let record = match lease.annotations().get(ANNOTATION) {
            Some(text) => serde_json::from_str(text).map_err(|error| {
                Failure::because(error, format!(
                    "the annotation {ANNOTATION} of the Lease {name} in the namespace {namespace} is damaged: free the Lease, and the coordinators elect a leader anew: {}",
                    self.free()
                ))
            })?,
            // Somebody has made the Lease for the coordinators.
            None => Record::default(),
        };
        if !holder.is_empty() && holder != record.holder.peer {
            return Err(format!(
                "the Lease {name} in the namespace {namespace} is held by `{holder}`, and its annotation {ANNOTATION} does not say so: if that is another program, set `[election] name` to another name; if it is a coordinator of Larder, free the Lease: {}",
                self.free()
            )
            .into());
        }
        Ok(record)
    }

    /// The command that frees the Lease. The holder and the record go together: neither is believed without the other.
    fn free(&self) -> String {
        let Self { name, namespace, .. } = self;
        let patch =
            json!({"metadata": {"annotations": {ANNOTATION: null}}, "spec": {"holderIdentity": null}});
        format!("kubectl --namespace {namespace} patch lease {name} --type merge -p '{patch}'")
    }
}

impl Register for Kubernetes {
    async fn read(&self) -> Result<Option<(Version, Record)>, Trouble> {
        match self.ask(LeaseRequest::Read).await? {
            Reply::Lease(lease) => Ok(Some((version(&lease)?, self.record_of(&lease)?))),
            Reply::Missing | Reply::Conflict => Ok(None),
        }
    }

    async fn write(&self, record: &Record, over: Option<&Version>) -> Result<Option<Version>, Trouble> {
        let mut lease = lease(record)?;
        let reply = if let Some(Version(version)) = over {
            lease["metadata"]["resourceVersion"] = version.as_str().into();
            self.ask(LeaseRequest::Change(&lease)).await?
        } else {
            lease["metadata"]["name"] = self.name.as_str().into();
            lease["metadata"]["labels"] = json!({"app.kubernetes.io/name": "larder"});
            self.ask(LeaseRequest::Make(&lease)).await?
        };
        match reply {
            Reply::Lease(lease) => Ok(Some(version(&lease)?)),
            Reply::Missing | Reply::Conflict => Ok(None),
        }
    }
}

/// A request to the API server.
enum LeaseRequest<'a> {
    Read,
    Make(&'a Value),
    Change(&'a Value),
}

/// The API server's answer about a Lease.
enum Reply {
    Lease(Box<Lease>),
    Missing,
    Conflict,
}

/// Checks that a kubeconfig can be read.
pub(crate) fn check_file(path: &Path) -> Result<(), Failure> {
    Kubeconfig::read_from(path).map(drop).map_err(unusable(path))
}

fn unusable(path: &Path) -> impl FnOnce(KubeconfigError) -> Failure {
    |error| Failure::because(error, format!("cannot use the kubeconfig {}", path.display()))
}

fn no_client(error: kube::Error) -> Failure {
    Failure::because(error, "cannot reach the API server with this configuration")
}

fn unreadable(error: impl Into<Trouble>) -> Failure {
    Failure::because(error, "the API server's answer cannot be read")
}

async fn from_file(path: &Path) -> Result<Config, KubeconfigError> {
    Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &KubeConfigOptions::default()).await
}

/// A Lease with this record, as JSON.
fn lease(record: &Record) -> Result<Value, serde_json::Error> {
    let now = MicroTime(Timestamp::now());
    let lease_s = i32::try_from(record.lease_ms.div_ceil(1_000)).unwrap_or(i32::MAX).max(1);
    let mut spec = json!({
        "holderIdentity": record.holder.peer,
        "leaseDurationSeconds": lease_s,
        "leaseTransitions": i32::try_from(record.term.saturating_sub(1)).unwrap_or(i32::MAX),
        "renewTime": now,
    });
    if record.renewals == 0 {
        spec["acquireTime"] = json!(now);
    }
    let annotations = json!({ANNOTATION: serde_json::to_string(record)?});
    Ok(json!({
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"annotations": annotations},
        "spec": spec,
    }))
}

fn version(lease: &Lease) -> Result<Version, Trouble> {
    Ok(Version(lease.resource_version().ok_or("a Lease without a resource version")?))
}

/// The pause that the API server asks for, in seconds.
fn pause(retry_after: &str) -> Option<Duration> {
    Some(Duration::from_secs(retry_after.parse().ok()?).min(MAX_PAUSE))
}

/// The rule of a Role that gives a right to a Lease. The right to make one cannot be bound to its name.
fn rule(verb: &str, name: &str) -> String {
    let names = if verb == CREATE { String::new() } else { format!(", resourceNames: [{name}]") };
    format!("{{apiGroups: [coordination.k8s.io], resources: [leases]{names}, verbs: [{verb}]}}")
}

/// The message of an API server's answer that is no Lease.
fn message(body: &[u8]) -> String {
    let said = serde_json::from_slice::<Status>(body).map(|status| status.message);
    said.unwrap_or_else(|_| String::from_utf8_lossy(&body[..body.len().min(MAX_MESSAGE_BYTES)]).into_owned())
}

const NO_CONFIG: &str = "cannot find the API server of Kubernetes: run in a pod with the token of a service account, or name a file in KUBECONFIG or `[election] kubeconfig`";

const GET: &str = "get";
const PATCH: &str = "patch";
const CREATE: &str = "create";

/// The annotation with the record.
const ANNOTATION: &str = "larder/record";

/// Time for a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);

/// The longest pause for which the API server is not asked.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// A Lease takes some 1.5 KiB.
const MAX_ANSWER_BYTES: usize = 1 << 20;

/// The most bytes that are shown of an answer that is no JSON.
const MAX_MESSAGE_BYTES: usize = 300;
