//! Options of `mica serve` as the keys of its configuration.

/// The table of a disk in a configuration.
pub(super) fn toml_of_disk(options: &[(&str, String)]) -> String {
    "[[disk]]\n".to_owned() + &toml(options)
}

/// Options as keys of a table. Values are plain text.
pub(super) fn toml(options: &[(&str, String)]) -> String {
    let (mut text, mut done) = (String::new(), Vec::new());
    for (key, _) in options {
        if done.contains(key) {
            continue;
        }
        done.push(key);
        let values: Vec<_> = options
            .iter()
            .filter(|(other, _)| other == key)
            .map(|(_, value)| match *key {
                "queues" | "ephemeral" | "allocation-depth" => value.clone(),
                _ => format!("\"{value}\""),
            })
            .collect();
        let values = values.join(", ");
        // What can be given more than once is an array.
        text += &match *key {
            "nbd" | "inject" => format!("{key} = [{values}]\n"),
            _ => format!("{key} = {values}\n"),
        };
    }
    text
}
