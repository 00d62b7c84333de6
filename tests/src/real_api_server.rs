//! A real API server of Kubernetes, with an etcd of its own.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, ensure};
use serde_json::json;
use tempfile::TempDir;

use crate::etcd::Etcd;
use crate::server::Killed;
use crate::tls::Authority;
use crate::wait;

/// A running API server with the namespace `larder`. Dropping it kills it.
pub struct RealApiServer {
    _child: Killed,
    url: String,
    _etcd: Etcd,
    // Last: the directory is removed when no process writes there any more.
    dir: TempDir,
}

impl RealApiServer {
    /// Starts a server, and waits until it serves; `None` if `tests/deploy/apiserver` has built none, or there is no etcd.
    ///
    /// # Errors
    /// Fails if there is a server and it does not come up.
    pub fn start() -> anyhow::Result<Option<Self>> {
        let program =
            Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../target/tools/kubernetes/kube-apiserver"));
        if !program.exists() {
            return Ok(None);
        }
        let Some(etcd) = Etcd::start()? else { return Ok(None) };
        let dir = tempfile::tempdir()?;
        let files = Authority::create()?.issue("kube-apiserver")?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let tokens = format!("{ADMIN},{ADMIN},1,\"system:masters\"\n{COORDINATOR},{ACCOUNT},2\n");
        let write = |name: &str, text: &str| -> anyhow::Result<String> {
            let path = dir.path().join(name);
            fs::write(&path, text)?;
            Ok(path.display().to_string())
        };
        write("ca.pem", &files.ca_pem)?;
        let (certificate, key) =
            (write("server.pem", &files.certificate_pem)?, write("server.key", &files.key_pem)?);
        let log = fs::File::create(dir.path().join("log"))?;
        let child = Command::new(program)
            .arg(format!("--etcd-servers={}", etcd.url()))
            .arg(format!("--secure-port={port}"))
            .arg(format!("--tls-cert-file={certificate}"))
            .arg(format!("--tls-private-key-file={key}"))
            .arg(format!("--service-account-key-file={certificate}"))
            .arg(format!("--service-account-signing-key-file={key}"))
            .arg(format!("--token-auth-file={}", write("tokens.csv", &tokens)?))
            .arg(format!("--cert-dir={}", dir.path().display()))
            .args([
                "--bind-address=127.0.0.1",
                "--endpoint-reconciler-type=none",
                "--authorization-mode=RBAC",
            ])
            .args(["--service-account-issuer=https://kubernetes.default.svc"])
            .args(["--service-cluster-ip-range=10.0.0.0/24"])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()?;
        let server =
            Self { _child: Killed(child), url: format!("https://127.0.0.1:{port}"), _etcd: etcd, dir };
        let made = || server.kubectl(&["create", "namespace", "larder"]).ok();
        wait::until("the API server serves", made);
        Ok(Some(server))
    }

    /// A kubeconfig for an account with all rights.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn admin(&self) -> anyhow::Result<PathBuf> {
        self.kubeconfig(ADMIN)
    }

    /// A kubeconfig for the coordinators' account.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn coordinator(&self) -> anyhow::Result<PathBuf> {
        self.kubeconfig(COORDINATOR)
    }

    /// Runs `kubectl` with all rights. Returns its output.
    ///
    /// # Errors
    /// Fails if there is no `kubectl`, or `kubectl` fails.
    pub fn kubectl(&self, args: &[&str]) -> anyhow::Result<String> {
        let mut command = Command::new("kubectl");
        command.arg("--kubeconfig").arg(self.admin()?).arg("--cache-dir").arg(self.dir.path().join("cache"));
        let Output { status, stdout, stderr } = command.args(args).output().context("there is no kubectl")?;
        ensure!(status.success(), "kubectl {args:?}: {}", String::from_utf8_lossy(&stderr));
        Ok(String::from_utf8(stdout)?)
    }

    fn kubeconfig(&self, token: &str) -> anyhow::Result<PathBuf> {
        let path = self.dir.path().join(format!("{token}.kubeconfig"));
        let ca = self.dir.path().join("ca.pem");
        let context = json!({"cluster": "test", "user": "test", "namespace": "larder"});
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.url, "certificate-authority": ca}}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
        });
        fs::write(&path, config.to_string())?;
        Ok(path)
    }
}

/// The token of the account with all rights.
const ADMIN: &str = "admin";
/// The token of the coordinators' account, and the account's name.
const COORDINATOR: &str = "coordinator";
const ACCOUNT: &str = "system:serviceaccount:larder:larder-coordinator";
