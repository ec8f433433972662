//! The LUKS header of an image, as qemu-img shows it.

use mica_crypt::luks::LuksHeader;
use mica_units::SECTOR_BYTES;
use serde_json::{Map, Value, json};

/// The object that describes `luks`, with the `format` that it says.
pub(super) fn of_luks(luks: &LuksHeader, format: Option<&str>) -> Value {
    let (mode, number, hash) = luks.cipher.parts();
    let bits = luks.cipher.aes_bits(luks.key_bytes).unwrap_or_default();
    let slots = luks.slots.iter().map(|slot| {
        let at = u64::from(slot.material_sectors) * SECTOR_BYTES;
        match slot.iterations {
            None => json!({ "active": false, "key-offset": at }),
            Some(iterations) => json!({
                "active": true,
                "iters": iterations,
                "key-offset": at,
                "stripes": slot.stripes(),
            }),
        }
    });
    let mut all = Map::new();
    let mut set = |name: &str, value: Value| {
        all.insert(name.to_owned(), value);
    };
    set("ivgen-alg", number.into());
    if let Some(hash) = hash {
        set("ivgen-hash-alg", hash.into());
    }
    set("detached-header", false.into());
    set("hash-alg", luks.hash.name().into());
    set("cipher-alg", format!("aes-{bits}").into());
    set("uuid", luks.uuid.clone().into());
    if let Some(format) = format {
        set("format", format.into());
    }
    set("cipher-mode", mode.into());
    set("slots", slots.collect());
    set("payload-offset", luks.payload_offset().into());
    set("master-key-iters", luks.digest_iterations.get().into());
    Value::Object(all)
}

/// The same as lines, beneath `name`.
pub(super) fn lines(name: &str, value: &Value) -> Vec<String> {
    let mut lines = vec![format!("    {name}:")];
    add(&mut lines, 8, value);
    lines
}

fn add(lines: &mut Vec<String>, indent: usize, value: &Value) {
    let Value::Object(fields) = value else { return };
    for (name, value) in fields {
        let name = name.replace('-', " ");
        match value {
            Value::Array(items) => {
                lines.push(format!("{:indent$}{name}:", ""));
                for (number, item) in items.iter().enumerate() {
                    lines.push(format!("{:indent$}    [{number}]:", ""));
                    add(lines, indent + 8, item);
                }
            }
            Value::String(text) => lines.push(format!("{:indent$}{name}: {text}", "")),
            other => lines.push(format!("{:indent$}{name}: {other}", "")),
        }
    }
}
