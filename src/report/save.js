/* SPDX-License-Identifier: Apache-2.0 */
/* report --svg: draws the pictures of a page into a folder, each as a file; run by Node.js. Pictures of one name get
 * numbers. */
"use strict";
const fs = require("fs"), path = require("path"), [page, folder] = process.argv.slice(-2);
const text = fs.readFileSync(page, "utf8");
const element = (id) => text.match(new RegExp(`<script[^>]* id="${id}">([^]*?)</script>`))[1];
const {panelsOf, standalone} = new Function(element("draw") + "; return {panelsOf, standalone};")();
const seen = {};
for (const panel of panelsOf(JSON.parse(element("data")))) {
    if (!panel.draw)
        continue;
    const nth = seen[panel.name] = (seen[panel.name] || 0) + 1;
    fs.writeFileSync(path.join(folder, panel.name + (nth > 1 ? `-${nth}` : "") + ".svg"), standalone(panel.draw().svg));
}
