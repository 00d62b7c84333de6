//! Tests of the settings that change at once, and of those that wait for the next start.

use bytesize::ByteSize;
use larder_protocol::reload::ChangedSetting;

use super::*;
use crate::config::TenantConfig;

fn keys(settings: &[ChangedSetting]) -> Vec<&str> {
    settings.iter().map(|setting| setting.key.as_str()).collect()
}

fn tenant(name: &str, max_bytes: Option<ByteSize>) -> TenantConfig {
    let socket = format!("/run/{name}.sock").into();
    TenantConfig { name: name.to_owned(), socket, max_bytes, max_window_bytes: None }
}

#[test]
fn what_can_change_does_and_the_rest_is_named() {
    let running = Config { tenants: vec![tenant("a", None), tenant("b", None)], ..Config::default() };
    let mut new = running.clone();
    new.log = Some("debug".to_owned());
    new.host.policy = "sieve".to_owned();
    new.host.arena_bytes = ByteSize::gib(3);
    new.tenants = vec![tenant("b", Some(ByteSize::gib(1))), tenant("a", None)];
    let merged = with_changes(&running, &new);
    let applied = differences(&running, &merged);
    assert_eq!(keys(&applied), ["host.policy", "log", "tenants.b.max_bytes"]);
    assert_eq!((applied[1].before.as_str(), applied[1].after.as_str()), ("null", "\"debug\""));
    assert_eq!(keys(&differences(&merged, &new)), ["host.arena_bytes"], "the order of tenants is none");
}

#[test]
fn tenants_come_and_go_and_change_at_once() {
    let running = Config { tenants: vec![tenant("a", None)], ..Config::default() };
    let new = Config { tenants: vec![tenant("c", Some(ByteSize::gib(1)))], ..Config::default() };
    let merged = with_changes(&running, &new);
    assert_eq!(merged, new);
    let applied = differences(&running, &merged);
    assert_eq!(keys(&applied), ["tenants.a.socket", "tenants.c.max_bytes", "tenants.c.socket"]);
}

#[test]
fn an_empty_file_removes_and_changes_no_tenant() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("node.toml");
    let check = |running: &Config, text: &str| {
        std::fs::write(&file, text).unwrap();
        let (new, names_tenants) = Config::load_and_look(&file).unwrap();
        check_tenants(running, &new, names_tenants)
    };
    let running =
        Config { tenants: vec![tenant("default", None), tenant("chat", None)], ..Config::default() };
    for text in ["", "name = \"a\"\n"] {
        let error = check(&running, text).unwrap_err();
        assert!(error.contains("no [[tenants]]") && error.contains("`chat`"), "{error}");
        assert_eq!(check(&Config::default(), text), Ok(()), "the default tenant needs no name");
    }
    let mut own = Config::default();
    own.tenants[0].max_bytes = Some(ByteSize::gib(1));
    let error = check(&own, "").unwrap_err();
    assert!(error.contains("would change tenant `default`:"), "{error}");
    let named = "[[tenants]]\nname = \"default\"\nsocket = \"/run/larder/default.sock\"\n";
    assert_eq!(check(&running, named), Ok(()));
}

#[test]
fn the_same_configuration_has_no_differences() {
    assert_eq!(differences(&Config::default(), &Config::default()), []);
}

#[test]
fn a_port_that_the_system_chose_may_stand_in_the_file() {
    let listening = |listen: &str| {
        let mut config = Config::default();
        config.http.listen = Some(listen.parse().unwrap());
        config
    };
    let (running, new) = (listening("127.0.0.1:0"), listening("127.0.0.1:9440"));
    assert_eq!(with_changes(&running, &new), new);
    let running = listening("127.0.0.1:9441");
    assert_eq!(with_changes(&running, &new), running);
}

#[tokio::test]
async fn the_file_is_read_on_another_thread_since_its_drive_may_hang() {
    // The content is the name of the thread that reads it.
    let file = PathBuf::from("/proc/thread-self/comm");
    let own = std::fs::read_to_string(&file).unwrap();
    let reloadable = Reloadable {
        config: Config::default(),
        file,
        host: HostFacts::read(Path::new("/")).unwrap(),
        set_log: Box::new(|_| Ok(())),
        examine: Box::new(|_| Vec::new()),
    };
    let reloads = Reloads::new(Some(reloadable), Audit::default());
    reloads.begin(Changeable {
        actors: Vec::new(),
        tenants: Tenants::default(),
        change_tenants: mpsc::channel(1).0,
        peers: None,
        drains: None,
    });
    let error = reloads.reload("me").await.unwrap_err();
    assert!(error.contains("comm") && !error.contains(own.trim()), "{own} has read: {error}");

    tokio::time::pause();
    let hangs = reloads.0.turn.lock().await;
    let error = reloads.reload("me").await.unwrap_err();
    assert!(error.contains("an earlier reload has not ended"), "{error}");
    drop(hangs);
    assert!(reloads.reload("me").await.unwrap_err().contains("comm"));
}
