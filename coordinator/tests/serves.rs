//! The coordinator as its users see it: over HTTP.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread::JoinHandle;

use larder_coordinator::{Config, HttpConfig, NodeConfig, NodeStatus, Status, run};
use tokio::sync::oneshot;

struct Coordinator {
    http: SocketAddr,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl Coordinator {
    fn start(nodes: Vec<NodeConfig>) -> Self {
        let (stop, stopped) = oneshot::channel();
        let (ready, http) = mpsc::channel();
        let config = Config { http: HttpConfig { listen: ([127, 0, 0, 1], 0).into() }, nodes };
        let thread = std::thread::spawn(move || {
            let stop = async {
                let _ = stopped.await;
            };
            let server = run(config, |r| ready.send(r.http).unwrap(), stop);
            actix_rt::System::new().block_on(server).unwrap();
        });
        Self { http: http.recv().unwrap(), stop, thread }
    }

    fn get(&self, path: &str) -> String {
        let url = format!("http://{}{path}", self.http);
        ureq::get(url).call().unwrap().body_mut().read_to_string().unwrap()
    }
}

#[test]
fn a_coordinator_serves_health_metrics_and_status_until_it_is_told_to_stop() {
    let node = NodeConfig { name: "node-0".into(), http: ([127, 0, 0, 1], 9).into() };
    let coordinator = Coordinator::start(vec![node.clone()]);
    assert_eq!(coordinator.get("/healthz"), "ok\n");
    assert_eq!(coordinator.get("/readyz"), "ok\n");
    assert!(coordinator.get("/metrics").contains("larder_coordinator_nodes 1"));
    let status: Status = serde_json::from_str(&coordinator.get("/status")).unwrap();
    assert_eq!(status.nodes, [NodeStatus { name: node.name, http: node.http }]);

    coordinator.stop.send(()).unwrap();
    coordinator.thread.join().unwrap();
    assert!(ureq::get(format!("http://{}/healthz", coordinator.http)).call().is_err());
}
