//! One contract for every register of an election: in memory, in etcd, in a Lease of Kubernetes.

use larder_coordinator::election::{Candidate, Record};
use larder_coordinator::register::{Memory, Register};
use tokio::runtime::{Builder, Runtime};

/// Checks the contract of a register for elections, through two handles of one register that has no record yet.
async fn holds_the_contract<R: Register>(one: R, other: R) {
    let record = |life: u64, renewals| {
        let holder = Candidate { life, peer: format!("c-{life}:1"), http: format!("[::{life}]:2") };
        Record { holder, term: u64::MAX >> 2, renewals, lease_ms: 6_000 }
    };
    assert_eq!(one.read().await.unwrap(), None);
    let first = one.write(&record(1, 0), None).await.unwrap().expect("nobody has written");
    assert_eq!(other.read().await.unwrap(), Some((first.clone(), record(1, 0))));
    assert_eq!(other.write(&record(2, 0), None).await.unwrap(), None, "there is a record");
    let second = one.write(&record(1, 1), Some(&first)).await.unwrap().expect("nobody else has written");
    assert_ne!(first, second, "every write is a change that others see");
    assert_eq!(other.write(&record(2, 0), Some(&first)).await.unwrap(), None, "that is an old version");
    assert_eq!(other.read().await.unwrap(), Some((second.clone(), record(1, 1))));
    // Writing the same record again makes another version.
    let third = other.write(&record(1, 1), Some(&second)).await.unwrap().expect("nobody else has written");
    assert_ne!(second, third);
    let mut version = third;
    for round in 2..12 {
        let (mine, theirs) = (record(1, round), record(2, round));
        let (mine, theirs) =
            futures_util::join!(one.write(&mine, Some(&version)), other.write(&theirs, Some(&version)));
        let written = [mine.unwrap(), theirs.unwrap()];
        assert_eq!(written.iter().flatten().count(), 1, "of two writes over one version exactly one is done");
        let winner = if written[0].is_some() { 1 } else { 2 };
        let kept = one.read().await.unwrap().expect("there is a record");
        assert_eq!(Some(&kept.0), written.iter().flatten().next());
        assert_eq!(kept.1, record(winner, round));
        version = kept.0;
    }
    // A leader that resigns leaves a record without a holder; the next leader writes over it.
    let nobody = Record { holder: Candidate::default(), ..record(1, 12) };
    let freed = one.write(&nobody, Some(&version)).await.unwrap().expect("nobody else has written");
    assert_eq!(other.read().await.unwrap(), Some((freed.clone(), nobody)));
    let taken = other.write(&record(2, 0), Some(&freed)).await.unwrap().expect("nobody else has written");
    assert_eq!(one.read().await.unwrap(), Some((taken, record(2, 0))));
}

/// Runs a future to its end. Work that a register does in the background goes on when the same thread runs another future.
fn run<T>(test: impl Future<Output = T>) -> T {
    thread_local! {
        static RUNTIME: Runtime = Builder::new_current_thread().enable_all().build().unwrap();
    }
    RUNTIME.with(|runtime| runtime.block_on(test))
}

#[test]
fn a_register_in_memory_holds_the_contract() {
    let register = Memory::default();
    run(holds_the_contract(register.clone(), register));
}

#[cfg(feature = "etcd")]
mod etcd {
    use std::net::TcpListener;
    use std::path::Path;
    use std::time::Duration;

    use larder_coordinator::ElectionConfig;
    use larder_coordinator::register::Register as _;
    use larder_coordinator::register::etcd::Etcd as Key;
    use larder_tests::etcd::Etcd;
    use larder_tests::tls::Authority;
    use larder_tests::wait;

    use super::super::elections::etcd;
    use super::{holds_the_contract, run};

    fn config(etcd: &Etcd, name: &str) -> ElectionConfig {
        let endpoints = Some(vec![etcd.url().to_owned()]);
        ElectionConfig { endpoints, name: name.to_owned(), ..ElectionConfig::default() }
    }

    #[test]
    fn a_key_in_etcd_holds_the_contract() {
        let Some(etcd) = etcd() else { return };
        let key = |name: &str| Key::new(&config(&etcd, name)).unwrap();
        let (one, same, other) = (key("one"), key("one"), key("two"));
        run(async {
            Box::pin(holds_the_contract(one, same)).await;
            assert_eq!(other.read().await.unwrap(), None, "clusters with other names do not meet");
            // etcd dies: a read fails, and never returns a record that nobody wrote.
            drop(etcd);
            let read = tokio::time::timeout(Duration::from_secs(5), other.read()).await;
            assert!(!matches!(read, Ok(Ok(_))), "{read:?}");
        });
    }

    #[test]
    fn a_member_of_etcd_that_hangs_costs_one_question_and_is_then_left_alone() {
        let Some(etcd) = etcd() else { return };
        // It takes connections and never answers.
        let hangs = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut config = config(&etcd, "key");
        config.endpoints.as_mut().unwrap().insert(0, format!("http://{}", hangs.local_addr().unwrap()));
        let key = Key::new(&config).unwrap();
        run(async {
            let read = async |seconds| tokio::time::timeout(Duration::from_secs(seconds), key.read()).await;
            read(1).await.expect_err("it hangs");
            for _ in 0..20 {
                assert_eq!(read(30).await.expect("the other member answers").unwrap(), None);
            }
        });
    }

    #[test]
    fn a_key_with_a_foreign_value_is_named_with_what_to_do() {
        let Some(etcd) = etcd() else { return };
        // The key `a` and the value `b`, in base64.
        let put = ureq::post(format!("{}/v3/kv/put", etcd.url())).send(r#"{"key": "YQ==", "value": "Yg=="}"#);
        put.unwrap();
        let error = run(Key::new(&config(&etcd, "a")).unwrap().read()).unwrap_err().to_string();
        assert_eq!(
            error,
            "the key a of etcd has a value that no coordinator wrote: set `[election] name` to another key, or delete this one"
        );
    }

    #[test]
    fn an_etcd_that_serves_known_certificates_only_holds_the_contract_for_those_who_have_one() {
        let authority = Authority::create().unwrap();
        if etcd().is_none() {
            return;
        }
        let etcd = Etcd::start_tls(&authority).unwrap().expect("it is here");
        let dir = tempfile::tempdir().unwrap();
        let known = secure(&etcd, &authority, dir.path());
        let mut stranger = secure(&etcd, &Authority::create().unwrap(), &dir.path().join("stranger"));
        let mut nobody = known.clone();
        (nobody.certificate, nobody.key) = (None, None);
        let deadline = Duration::from_secs(10);
        run(async {
            let (one, other) = (Key::new(&known).unwrap(), Key::new(&known).unwrap());
            Box::pin(holds_the_contract(one, other)).await;
            for config in [&stranger, &nobody] {
                let read = Key::new(config).unwrap();
                let read = tokio::time::timeout(deadline, read.read()).await;
                assert!(!matches!(read, Ok(Ok(_))), "{config:?}: {read:?}");
            }
        });
        stranger.ca = Some("/nowhere/ca.pem".into());
        let error = Key::new(&stranger).err().unwrap().to_string();
        assert_eq!(error, "cannot read /nowhere/ca.pem, which [election] names for etcd");
    }

    /// A configuration with a certificate of this authority.
    fn secure(etcd: &Etcd, authority: &Authority, dir: &Path) -> ElectionConfig {
        let files = authority.issue("larder").unwrap();
        std::fs::create_dir_all(dir).unwrap();
        let [ca, certificate, key] = ["ca.pem", "larder.pem", "larder.key"].map(|name| dir.join(name));
        std::fs::write(&ca, files.ca_pem).unwrap();
        std::fs::write(&certificate, files.certificate_pem).unwrap();
        std::fs::write(&key, files.key_pem).unwrap();
        let (ca, certificate, key) = (Some(ca), Some(certificate), Some(key));
        ElectionConfig { ca, certificate, key, ..config(etcd, "larder-coordinator") }
    }

    #[test]
    fn an_etcd_that_wants_passwords_holds_the_contract_for_the_user_of_the_key() {
        let Some(etcd) = etcd() else { return };
        etcd.require_passwords().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let user = |name: &str, password: &str| {
            let file = dir.path().join(password);
            std::fs::write(&file, format!("{password}\n")).unwrap();
            let (user, password_file) = (Some("larder".into()), Some(file));
            ElectionConfig { user, password_file, ..config(&etcd, name) }
        };
        let known = user("larder-coordinator", "larder");
        let refused = [user("larder-coordinator", "wrong"), user("other", "larder"), config(&etcd, "other")];
        run(async {
            let (one, other) = (Key::new(&known).unwrap(), Key::new(&known).unwrap());
            Box::pin(holds_the_contract(one, other)).await;
            for config in refused {
                let error = Key::new(&config).unwrap().read().await.unwrap_err().to_string();
                let is_clear = ["give the user the right", "content of `password_file`", "it wants a user"];
                assert!(is_clear.iter().any(|clear| error.contains(clear)), "{error}");
            }
        });
    }

    #[test]
    fn a_user_whose_token_is_forgotten_shows_the_password_again() {
        let Some(mut etcd) = etcd() else { return };
        etcd.require_passwords().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("password");
        std::fs::write(&file, "larder").unwrap();
        let (user, password_file) = (Some("larder".into()), Some(file));
        let config = ElectionConfig { user, password_file, ..config(&etcd, "larder-coordinator") };
        let key = Key::new(&config).unwrap();
        run(key.read()).unwrap();
        // Tokens live in etcd's memory.
        etcd.restart().unwrap();
        wait::until("the key is read again", || run(key.read()).ok());
    }
}

#[cfg(feature = "kubernetes")]
mod kubernetes {
    use std::collections::BTreeSet;
    use std::error::Error;
    use std::net::TcpListener;
    use std::path::Path;
    use std::time::Duration;

    use larder_coordinator::election::{Candidate, Record, Version};
    use larder_coordinator::register::kubernetes::Kubernetes;
    use larder_coordinator::register::{Register as _, Trouble as Failure};
    use larder_tests::api_server::Trouble::{
        AnswerLost, Conflict, Failure as Broken, Garbage, Late, Lost, Skewed, Stale, Timeout, TooMany,
    };
    use larder_tests::api_server::{ALL_RIGHTS, Account, ApiServer, NAMESPACE, Trouble};
    use larder_tests::real_api_server::RealApiServer;
    use larder_tests::tls::Authority;
    use larder_tests::wait;
    use serde_json::{Value, json};
    use tempfile::TempDir;

    use super::{holds_the_contract, run};

    const LEASE: &str = "larder-coordinator";

    /// The rights of the chart's Role.
    const COORDINATOR: Account =
        Account { token: "larder-coordinator", rights: &[("get", Some(LEASE)), ("patch", Some(LEASE))] };

    struct World {
        api: ApiServer,
        dir: TempDir,
    }

    fn world() -> World {
        World { api: ApiServer::start().unwrap(), dir: tempfile::tempdir().unwrap() }
    }

    impl World {
        fn register(&self, account: &Account, namespace: &str, name: &str) -> Kubernetes {
            let config = self.api.kubeconfig(self.dir.path(), account, namespace).unwrap();
            run(Kubernetes::new(Some(&config), name.to_owned())).unwrap()
        }

        fn own(&self) -> Kubernetes {
            self.register(&ALL_RIGHTS, NAMESPACE, LEASE)
        }
    }

    fn record(life: u64, renewals: u64) -> Record {
        let holder = Candidate { life, peer: format!("c-{life}:7601"), http: format!("c-{life}:7600") };
        Record { holder, term: 3, renewals, lease_ms: 6_000 }
    }

    fn record_of(lease: &Value) -> Record {
        serde_json::from_str(lease["metadata"]["annotations"]["larder/record"].as_str().unwrap()).unwrap()
    }

    fn version_of(lease: &Value) -> Version {
        Version(lease["metadata"]["resourceVersion"].as_str().unwrap().to_owned())
    }

    fn causes(error: Failure) -> String {
        let causes = std::iter::successors(Some(&*error as &(dyn Error + 'static)), |&error| error.source());
        causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
    }

    #[test]
    fn a_lease_holds_the_contract() {
        let world = world();
        run(holds_the_contract(world.own(), world.own()));
        let other = world.register(&ALL_RIGHTS, NAMESPACE, "other");
        assert_eq!(run(other.read()).unwrap(), None, "clusters with other names do not meet");
    }

    #[test]
    fn a_lease_behind_tls_holds_the_contract_and_nobody_else_passes_for_its_server() {
        let files = Authority::create().unwrap().issue("server").unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let api = ApiServer::start_on(listener, Some(&files)).unwrap();
        let world = World { api, dir: tempfile::tempdir().unwrap() };
        run(holds_the_contract(world.own(), world.own()));
        std::fs::write(
            world.dir.path().join("kubernetes-ca.pem"),
            Authority::create().unwrap().issue("x").unwrap().ca_pem,
        )
        .unwrap();
        let config = world.dir.path().join("all-rights.larder.kubeconfig");
        let register = run(Kubernetes::new(Some(&config), LEASE.into())).unwrap();
        let error = causes(run(register.read()).unwrap_err());
        assert!(error.contains("invalid peer certificate"), "{error}");
    }

    /// A Lease that the chart made, and an account with the chart's rights, which cannot make Leases.
    #[test]
    fn a_lease_that_somebody_made_for_the_coordinators_is_free_and_keeps_what_they_do_not_know() {
        let world = world();
        let labels = json!({"app.kubernetes.io/managed-by": "Helm"});
        world.api.admit(COORDINATOR);
        world.api.put(LEASE, json!({"metadata": {"labels": labels, "annotations": {"of": "others"}}}));
        let register = world.register(&COORDINATOR, NAMESPACE, LEASE);
        let (version, found) = run(register.read()).unwrap().unwrap();
        assert_eq!(found, Record::default());
        run(register.write(&record(1, 0), Some(&version))).unwrap().unwrap();
        let lease = world.api.lease(LEASE).unwrap();
        assert_eq!(lease["metadata"]["labels"], labels);
        assert_eq!(lease["metadata"]["annotations"]["of"], "others");
        assert_eq!(record_of(&lease), record(1, 0));
    }

    #[test]
    fn a_lease_says_to_kubectl_who_holds_it_and_since_when() {
        let world = world();
        let register = world.own();
        let version = run(register.write(&record(1, 0), None)).unwrap().unwrap();
        let taken = world.api.lease(LEASE).unwrap()["spec"].clone();
        let says = |spec: &Value, key: &str| spec[key].clone();
        assert_eq!(says(&taken, "holderIdentity"), "c-1:7601");
        assert_eq!(says(&taken, "leaseDurationSeconds"), 6);
        assert_eq!(says(&taken, "leaseTransitions"), 2, "two have led before");
        assert_eq!(taken["acquireTime"], taken["renewTime"]);
        let version = run(register.write(&record(1, 1), Some(&version))).unwrap().unwrap();
        let renewed = world.api.lease(LEASE).unwrap()["spec"].clone();
        assert_eq!(renewed["acquireTime"], taken["acquireTime"]);
        assert!(renewed["renewTime"].as_str() > taken["renewTime"].as_str(), "{renewed}");
        let free = Record { holder: Candidate::default(), lease_ms: 1, term: u64::MAX, ..record(1, 2) };
        run(register.write(&free, Some(&version))).unwrap().unwrap();
        let freed = world.api.lease(LEASE).unwrap()["spec"].clone();
        assert_eq!(says(&freed, "holderIdentity"), "");
        assert_eq!(says(&freed, "leaseDurationSeconds"), 1, "Kubernetes allows no less");
        assert_eq!(says(&freed, "leaseTransitions"), i32::MAX);
    }

    #[test]
    fn what_is_missing_is_named() {
        let world = world();
        let refused = |account: &Account, namespace: &str, name: &str, is_write: bool| {
            let register = world.register(account, namespace, name);
            let failed = if is_write {
                run(register.write(&record(1, 0), None)).unwrap_err()
            } else {
                run(register.read()).unwrap_err()
            };
            failed.to_string()
        };
        let stranger = Account { token: "stranger", rights: &[] };
        let unknown = refused(&stranger, NAMESPACE, LEASE, false);
        assert!(unknown.contains("401") && unknown.contains("is its token mounted"), "{unknown}");
        world.api.admit(stranger.clone());
        let said = refused(&stranger, NAMESPACE, LEASE, false);
        let rule = "{apiGroups: [coordination.k8s.io], resources: [leases], resourceNames: [larder-coordinator], verbs: [get]}";
        assert!(
            said.contains(rule) && said.contains("User \"system:serviceaccount:larder:stranger\" cannot get"),
            "{said}"
        );
        let said = refused(&stranger, NAMESPACE, LEASE, true);
        assert!(said.contains("resources: [leases], verbs: [create]}"), "{said}");
        world.api.put(LEASE, json!({}));
        let reader = Account { token: "reader", rights: &[("get", None)] };
        world.api.admit(reader.clone());
        let register = world.register(&reader, NAMESPACE, LEASE);
        let (version, _) = run(register.read()).unwrap().unwrap();
        let said = run(register.write(&record(1, 0), Some(&version))).unwrap_err().to_string();
        assert!(said.contains("may not patch the Lease") && said.contains("verbs: [patch]}"), "{said}");
        let said = refused(&ALL_RIGHTS, "nowhere", LEASE, true);
        assert!(said.contains("there is no namespace nowhere"), "{said}");
        world.api.put("foreign", json!({"spec": {"holderIdentity": "kube-scheduler-0"}}));
        let said = refused(&ALL_RIGHTS, NAMESPACE, "foreign", false);
        assert!(said.contains("held by `kube-scheduler-0`") && said.contains("another program"), "{said}");
        world.api.put("damaged", json!({"metadata": {"annotations": {"larder/record": "{}"}}}));
        let said = refused(&ALL_RIGHTS, NAMESPACE, "damaged", false);
        assert!(said.contains("the annotation larder/record of the Lease damaged"), "{said}");
        let config = run(Kubernetes::new(Some(Path::new("/nowhere/kubeconfig")), LEASE.into()));
        assert_eq!(config.err().unwrap().to_string(), "cannot use the kubeconfig /nowhere/kubeconfig");
    }

    #[test]
    fn a_lease_whose_record_is_damaged_or_gone_is_free_after_the_command_that_the_error_names() {
        for broken in [json!("{}"), Value::Null] {
            let world = world();
            let register = world.own();
            run(register.write(&record(1, 0), None)).unwrap().unwrap();
            world.api.patch(LEASE, &json!({"metadata": {"annotations": {"larder/record": broken}}}));
            let said = run(register.read()).unwrap_err().to_string();
            let command = format!("kubectl --namespace {NAMESPACE} patch lease {LEASE} --type merge -p '");
            let patch = said.split_once(&command).and_then(|(_, patch)| patch.strip_suffix('\'')).unwrap();
            world.api.patch(LEASE, &serde_json::from_str(patch).unwrap());
            let (version, found) = run(register.read()).unwrap().unwrap();
            assert_eq!(found, Record::default(), "{said}");
            run(register.write(&record(2, 0), Some(&version))).unwrap().unwrap();
        }
    }

    #[test]
    fn an_api_server_that_wants_to_be_left_alone_is_left_alone_for_so_long() {
        let world = world();
        let register = world.own();
        run(async {
            world.api.next(&[TooMany(1)]);
            let busy = register.read().await.unwrap_err().to_string();
            assert_eq!(busy, "the API server has too much to do (429); the coordinator waits 1s");
            let asked = world.api.requests();
            let soon = tokio::time::timeout(Duration::from_millis(300), register.read()).await;
            assert!(soon.is_err(), "{soon:?}");
            assert_eq!(world.api.requests(), asked, "nothing was asked meanwhile");
            assert_eq!(register.read().await.unwrap(), None);
        });
    }

    #[test]
    fn a_request_that_is_given_up_holds_up_no_other() {
        let world = world();
        let register = world.own();
        run(async {
            world.api.next(&[Late(60_000)]);
            let given_up = tokio::time::timeout(Duration::from_millis(100), register.read()).await;
            assert!(given_up.is_err(), "{given_up:?}");
            assert_eq!(register.read().await.unwrap(), None);
        });
    }

    /// The answer that a writer got for its write.
    #[derive(Debug)]
    struct Claim {
        record: Record,
        told: Result<Option<Version>, String>,
    }

    /// Under all troubles: a write reported as written is written once, a write reported as not written is not, and nobody reads
    /// a record that nobody wrote.
    #[test]
    fn whatever_an_api_server_does_to_requests_a_lease_claims_nothing_that_is_wrong() {
        let troubles = [
            Conflict,
            TooMany(0),
            Broken,
            Lost,
            AnswerLost,
            Timeout,
            Late(5),
            Stale,
            Skewed(-30),
            Skewed(30),
            Garbage,
        ];
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let world = world();
        world.api.weather(seed, 40, &troubles);
        let (mut claims, mut reads) = (Vec::new(), Vec::new());
        let writers = [(1, world.own()), (2, world.own())];
        run(async {
            for round in 0..400 {
                for (life, register) in &writers {
                    let Ok(read) = register.read().await else { continue };
                    reads.push(read.clone());
                    let record = record(*life, round);
                    let told = register.write(&record, read.as_ref().map(|(version, _)| version)).await;
                    claims.push(Claim { record, told: told.map_err(causes) });
                }
            }
        });
        let written = world.api.written();
        let known: Vec<(Version, Record)> =
            written.iter().map(|one| (version_of(&one.lease), record_of(&one.lease))).collect();
        for (before, after) in known.iter().zip(&written[1..]) {
            assert_eq!(
                Some(&before.0.0),
                after.over.as_ref(),
                "seed {seed}: each is written over the one before"
            );
        }
        for claim in &claims {
            let done: Vec<_> = known.iter().filter(|(_, record)| *record == claim.record).collect();
            let is_true = match &claim.told {
                Ok(Some(version)) => done.len() == 1 && done[0].0 == *version,
                Ok(None) => done.is_empty(),
                Err(_) => done.len() <= 1,
            };
            assert!(is_true, "seed {seed}: {claim:?}, but {done:?}");
        }
        for read in &reads {
            let is_known = read.as_ref().is_none_or(|read| known.contains(read));
            assert!(is_known, "seed {seed}: {read:?} was read and never written");
        }
        let first = reads.iter().position(Option::is_some).unwrap();
        assert!(reads[first..].iter().all(Option::is_some), "seed {seed}: a record that was there is gone");
        let done = claims.iter().filter(|claim| matches!(claim.told, Ok(Some(_)))).count();
        let lost = claims.iter().filter(|claim| claim.told.is_err());
        let lost = lost.filter(|claim| known.iter().any(|(_, record)| *record == claim.record)).count();
        println!("{done} writes done, {lost} done and not told, of {}", claims.len());
        let happened: BTreeSet<Trouble> = world.api.happened().into_keys().collect();
        assert_eq!(happened, troubles.into_iter().collect(), "seed {seed}");
        assert!(done > 50 && lost > 10, "seed {seed}: too calm, or too wild, to show anything");
    }

    /// A real API server, in heavy tests.
    fn real() -> Option<RealApiServer> {
        if std::env::var_os("LARDER_HEAVY_TESTS").is_none() {
            larder_skips::skip("only heavy tests start a real API server");
            return None;
        }
        let started = RealApiServer::start().unwrap();
        if started.is_none() {
            larder_skips::skip("no API server here: tests/deploy/apiserver builds it");
        }
        started
    }

    #[test]
    fn a_lease_in_a_real_api_server_holds_the_contract() {
        let Some(server) = real() else { return };
        let admin = server.admin().unwrap();
        let register = |name: &str| run(Kubernetes::new(Some(&admin), name.to_owned())).unwrap();
        run(holds_the_contract(register("contract"), register("contract")));
        assert_eq!(run(register("other").read()).unwrap(), None);
    }

    #[test]
    fn the_rights_in_the_manifests_are_enough_and_are_for_one_lease_only() {
        let Some(server) = real() else { return };
        let manifest =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy/kubernetes/components/coordinators/lease.yaml");
        // Without validation: a server that has just started may not tell the types of all resources yet.
        server
            .kubectl(&["apply", "--validate=false", "--namespace", "larder", "--filename", manifest])
            .unwrap();
        let own = server.coordinator().unwrap();
        let register = |name: &str| run(Kubernetes::new(Some(&own), name.to_owned())).unwrap();
        let lease = register("larder-leader");
        // The account has its rights once the server has read the rule.
        let (free, nobody) =
            wait::until("the account may read the Lease", || run(lease.read()).ok()).unwrap();
        assert_eq!(nobody, Record::default());
        let version = run(lease.write(&record(1, 0), Some(&free))).unwrap().unwrap();
        assert_eq!(run(lease.write(&record(2, 0), Some(&free))).unwrap(), None);
        assert_eq!(run(lease.read()).unwrap(), Some((version, record(1, 0))));
        let said = run(register("other").read()).unwrap_err().to_string();
        assert!(
            said.contains("resourceNames: [other], verbs: [get]}") && said.contains("cannot get"),
            "{said}"
        );
        let said = run(lease.write(&record(1, 0), None)).unwrap_err().to_string();
        assert!(said.contains("verbs: [create]}") && said.contains("cannot create"), "{said}");
        // Applied again, the manifest takes nothing away from the record.
        server
            .kubectl(&["apply", "--validate=false", "--namespace", "larder", "--filename", manifest])
            .unwrap();
        assert_eq!(run(lease.read()).unwrap().unwrap().1, record(1, 0));
        let shown = server.kubectl(&["get", "lease", "larder-leader", "--namespace", "larder"]).unwrap();
        assert!(shown.contains("c-1:7601"), "{shown}");
    }
}
