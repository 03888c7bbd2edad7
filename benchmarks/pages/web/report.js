const parts = name => document.querySelectorAll(`.${name}`);
data.builds.filter(build => build.blocks.lines.length).forEach((build, index) => blocks(parts("blocks")[index], build.blocks));
data.builds.filter(build => build.timelines.length).forEach((build, index) => timelines(parts("timelines")[index], build.timelines));
