//! What a trainer is told that gives a wrong address, or no token: by real servers.
#![forbid(unsafe_code)]

use std::{net::TcpListener, time::Duration};

use featurestore::{
    Config, FeatureStore, Secret, ServerConfig, Settings, TransportChoice, server::CaptureServer,
    source::Source, workload::Model,
};
use transport_core::{Error, ErrorKind, SessionName};

/// A capture server in this process, served until the test ends.
async fn serve(settings: &[(&str, &str)]) -> (SessionName, SessionName, SessionName) {
    let mut all = Settings::new().or_default("arena", "1MiB").unwrap();
    for (name, value) in settings {
        all.set(name, *value).unwrap();
    }
    let config = ServerConfig::from_settings(&all).unwrap();
    let source = Source::Synthetic { model: Model { hidden: 8, taps: vec![1] }, seed: 1 };
    let server = CaptureServer::bind(&config, source).await.unwrap();
    let ready = server.ready_line();
    tokio::spawn(server.serve(std::future::pending()));
    let name = |text: &str| text.parse().unwrap();
    (name(&ready.http), name(&ready.session), name(ready.control.as_deref().unwrap()))
}

async fn refusal(config: &Config, server: &SessionName) -> Error {
    let opening = FeatureStore::open(config, std::slice::from_ref(server));
    let error = opening.await.map(drop).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&server.to_string()), "names the server: {text}");
    assert_eq!(text.matches("reach server").count(), 1, "says it once: {text}");
    error
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_run_is_gone_and_may_come_back() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody: SessionName = free.local_addr().unwrap().into();
    drop(free);
    for transport in ["auto", "shm", "tcp"] {
        let config = Config::default().transport(transport.parse().unwrap());
        let error = refusal(&config, &nobody).await;
        assert_eq!(error.kind(), ErrorKind::PeerGone, "{transport}: {error}");
        assert!(error.is_temporary(), "{transport}: {error}");
        let text = error.to_string();
        assert!(text.contains("is the capture server running?"), "{transport}: {text}");
        assert!(text.contains("control address") && text.contains("token"), "{transport}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_ports_of_a_server_are_told_from_its_control_port() {
    let (http, session, control) = serve(&[]).await;
    let error = refusal(&Config::default(), &http).await;
    assert_eq!(error.kind(), ErrorKind::Protocol);
    let text = error.to_string();
    assert!(text.contains("not a control listener (it speaks HTTP)"), "{text}");
    let text = refusal(&Config::default(), &session).await.to_string();
    assert!(text.contains("give the control address"), "{text}");
    FeatureStore::open(&Config::default(), &[control]).await.unwrap().close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_no_memory_holds_is_named() {
    let (_, _, control) = serve(&[]).await;
    let config = Config::default().transport(TransportChoice::Tcp).pool("900TiB".parse().unwrap());
    let error = FeatureStore::open(&config, &[control]).await.map(drop).unwrap_err();
    assert_eq!((error.kind(), error.is_temporary()), (ErrorKind::ConfigInvalid, false));
    assert!(error.to_string().contains("FEATURESTORE_POOL"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_closed_store_says_so() {
    let (_, _, control) = serve(&[]).await;
    let store = FeatureStore::open(&Config::default(), &[control]).await.unwrap();
    store.close().await.unwrap();
    store.close().await.unwrap();
    for error in [
        store.health().await.map(drop).unwrap_err(),
        store.get_many(vec![]).await.map(drop).unwrap_err(),
        store.release(vec![]).await.map(drop).unwrap_err(),
    ] {
        assert_eq!((error.kind(), error.is_temporary()), (ErrorKind::Closed, false), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_token_is_asked_for_and_a_given_one_opens() {
    let (_, _, control) = serve(&[("token", "correct horse battery")]).await;
    let error = refusal(&Config::default(), &control).await;
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    let text = error.to_string();
    assert!(text.contains("FEATURESTORE_TOKEN") && text.contains("Config::token"), "{text}");
    assert!(!text.contains("horse"), "{text}");
    let config = Config::default()
        .lease(Duration::from_secs(5))
        .token(Secret::new("correct horse battery").unwrap());
    FeatureStore::open(&config, &[control]).await.unwrap().close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn d21_only_the_capture_server_writes() {
    use transport_core::{
        Dtype, FeatureName, Generation, Publication, PublishOptions, Ready, RegionSlice, SampleId,
        SampleKey, StoreId, Tensor, TensorMeta,
    };
    let (_, _, control) = serve(&[]).await;
    for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
        let config = Config::default().transport(transport).pool("1MiB".parse().unwrap());
        let store = FeatureStore::open(&config, std::slice::from_ref(&control)).await.unwrap();
        let key = SampleKey::new(
            StoreId::new("run").unwrap(),
            SampleId::new("run:task-1").unwrap(),
            Generation(1),
        );
        let meta = TensorMeta::new(Dtype::Uint8, [4]).unwrap();
        let tensor = Tensor::new(meta, RegionSlice::copy_of(&[1; 4])).unwrap();
        let tensors = [(FeatureName::new("x").unwrap(), tensor)].into();
        let batch = vec![Publication::new(key, tensors, Ready::Now)];
        let error = store.samples().put(batch, PublishOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{transport}: {error}");
        assert!(error.to_string().contains("written by the capture server"), "{error}");
        store.close().await.unwrap();
    }
}
