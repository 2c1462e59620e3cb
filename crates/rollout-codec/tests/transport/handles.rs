//! Handles: small, the same size whatever they name, and never trusted.

use rollout_codec::transport::{Handle, MAX_HANDLE_BYTES, RolloutConfig};
use std::num::NonZeroU64;
use transport_core::ErrorKind;

use crate::support::{MIB, empty, memory, rollouts, text};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handles_do_not_grow() {
    let memory = memory(128 * MIB);
    let small = rollouts(memory.clone(), RolloutConfig::default());
    let config = RolloutConfig::default().chunks(NonZeroU64::new(128 << 10).unwrap(), 2);
    let large = rollouts(memory.clone(), config);
    let a = small.put(text(1)).await.unwrap();
    let b = large.put(text(48 * MIB)).await.unwrap();
    let (text_a, text_b) = (a.to_json().unwrap(), b.to_json().unwrap());
    let digits = text_b.len().abs_diff(text_a.len());
    assert!(digits < 64, "{text_a}\n{text_b}");
    assert!(text_b.len() < MAX_HANDLE_BYTES / 2, "{}", text_b.len());
    for handle in [&a, &b] {
        let text = handle.to_json().unwrap();
        let back = Handle::parse(text.as_bytes()).unwrap();
        assert_eq!(back.to_json().unwrap(), text);
        // Through a JSON library that knows nothing of it.
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        let again = Handle::parse(serde_json::to_string_pretty(&value).unwrap().as_bytes());
        assert_eq!(again.unwrap().to_json().unwrap().len(), text.len());
        let sample = small.get(&back).await.unwrap();
        assert_eq!(sample.header().rows(), handle.rows());
    }
    small.cleanup([&a, &b]).await.unwrap();
    empty(&*memory).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_handles_are_refused_or_find_nothing() {
    let memory = memory(64 * MIB);
    let over = rollouts(memory.clone(), RolloutConfig::default());
    let handle = over.put(text(MIB)).await.unwrap();
    let good = handle.to_json().unwrap();
    for (from, to) in [
        ("featurestore_rollout", "something_else"),
        ("\"version\":1", "\"version\":2"),
        ("\"xxh3\":\"", "\"xxh3\":\"0"),
        ("\"generation\":\"0", "\"generation\":\"x"),
        ("\"rows\":", "\"columns\":"),
        ("\"header_bytes\":", "\"header_bytes\":9"),
        ("\"root\":{", "\"root\":{\"more\":1,"),
    ] {
        assert!(good.contains(from), "{from}");
        let bad = good.replacen(from, to, 1);
        assert!(Handle::parse(bad.as_bytes()).is_err(), "{to}");
    }
    assert!(Handle::parse(" ".repeat(MAX_HANDLE_BYTES + 1).as_bytes()).is_err());
    for cut in 0..good.len() {
        assert!(Handle::parse(&good.as_bytes()[..cut]).is_err(), "cut at {cut}");
    }
    // What says something else than its root is found out.
    for (from, to) in [("\"rows\":", "\"rows\":1"), ("\"data_bytes\":", "\"data_bytes\":1")] {
        let other = Handle::parse(good.replacen(from, to, 1).as_bytes()).unwrap();
        let error = over.get(&other).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
    let sum = format!("{:016x}", handle.xxh3() ^ 1);
    let other = good.replacen(&format!("{:016x}", handle.xxh3()), &sum, 1);
    let error = over.get(&Handle::parse(other.as_bytes()).unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(over.get(&handle).await.is_ok());
    over.cleanup([&handle]).await.unwrap();
    empty(&*memory).await;
}
