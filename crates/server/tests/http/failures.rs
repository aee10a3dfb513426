//! A device that is lost: the server says so where load balancers look. (A server whose engine has ended ends itself.)
use crate::server::*;
use kvist_device::{MemoryBudget, Registry};
use kvist_model::{LoadOptions, Model, ModelFile};
use kvist_testing::recording::Recording;
use serde_json::json;
use std::sync::Arc;

fn ready(server: &Server) -> (u16, String) {
    let answer = server.get("/ready");
    (answer.status, answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned())
}

/// `/ready` once said that the server is ready after its GPU was lost, and every request failed.
#[test]
fn a_server_whose_device_is_lost_is_not_ready() {
    let device = Recording::default();
    let (options, budget) = (LoadOptions::default(), MemoryBudget::unlimited());
    let model = Model::load(&ModelFile::Embedded, device.clone(), &options, &budget, &mut |_, _| {}).unwrap();
    let registry = Registry::of(device.clone()).with(Box::new(device.clone()));
    let server = Server::start_on(Arc::new(model), &registry, "recording", config());
    let complete = || {
        let body = json!({"prompt": "fn main", "max_tokens": 2, "temperature": 0, "ignore_eos": true});
        server.post("/v1/completions", &body)
    };
    assert_eq!(complete().status, 200);
    assert_eq!(ready(&server), (200, String::new()));
    device.fail("the device was lost: on purpose");
    for _ in 0..2 {
        let (status, why) = ready(&server);
        assert!(status == 503 && why.contains("the device was lost: on purpose"), "{status}: {why}");
        assert_eq!(server.get("/health").status, 503, "only a restart helps");
        let refused = complete();
        assert!(refused.status == 500 && refused.text.contains("the model failed"), "{}", refused.text);
    }
}
